"""The events of a stream, decoded and verified; no I/O, shared by the sync and the async client.

What is verified as it arrives: the sequence has no gap; the echo is what was asked for; tensors are whole and of the
promised dtype, indices and shape; steps come in order; a log-prob is there exactly for stochastic steps; digests and
counts are right; the stream ends with ``finished``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import tensor_pb2
from torch import Tensor

from rollout_service.tensors import TORCH_DTYPES, from_bytes

from .errors import IntegrityError

ROLES = {
    pb.TENSOR_ROLE_LATENTS: "latents",
    pb.TENSOR_ROLE_NOISE: "noise",
    pb.TENSOR_ROLE_MEAN: "mean",
    pb.TENSOR_ROLE_VELOCITY: "velocity",
}


@dataclass(frozen=True)
class Accepted:
    """The request was admitted."""

    message: pb.RolloutAccepted


@dataclass(frozen=True)
class Started:
    """The schedule is known."""

    policy_version: int
    sigmas: tuple[float, ...]
    """T+1 exact fp32 values."""
    stochastic_steps: tuple[int, ...]
    """Steps that have a log-prob."""
    latents_indices: tuple[int, ...]
    """Absolute indices of the latents that come back."""


@dataclass(frozen=True)
class ConditioningEntry:
    """One argument that the denoiser received besides latents and timestep."""

    call_index: int
    """Which denoiser call of a step."""
    component: str
    name: str
    value: Any
    """A tensor, or a plain value."""
    batched: bool
    """Whether the first dimension of the tensor is the batch, with ``rows_per_sample`` rows."""
    rows_per_sample: int


@dataclass(frozen=True)
class ConditioningReceived:
    """The conditioning of one prompt."""

    prompt_index: int
    entries: tuple[ConditioningEntry, ...]


@dataclass(frozen=True)
class Step:
    """One complete step of one sample."""

    sample_index: int
    step_index: int
    log_prob: float | None
    """None for a deterministic step."""
    noise_std: float
    policy_version: int
    tensors: dict[tuple[str, int], Tensor]
    """By (role, absolute index): ``latents`` x_k, ``noise``, ``mean``, ``velocity``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class SampleFinished:
    """One sample ended."""

    sample_index: int
    error: pb.SampleError | None
    media: Tensor | tuple[bytes, ...] | None
    """uint8 [(frames,) height, width, 3], or PNG files (one per frame), if asked for."""


@dataclass(frozen=True)
class Finished:
    """The rollout ended."""

    message: pb.RolloutFinished


Event = Accepted | Started | ConditioningReceived | Step | SampleFinished | Finished


class _Assembly:
    """One tensor from its parts."""

    def __init__(self, part: tensor_pb2.Tensor) -> None:
        if part.dtype not in TORCH_DTYPES:
            raise IntegrityError(f"a tensor has the unknown dtype {part.dtype}")
        self._dtype, self._shape = TORCH_DTYPES[part.dtype], tuple(part.shape)
        self._data = bytearray()

    def add(self, part: tensor_pb2.Tensor) -> Tensor | None:
        """Append a part; the tensor if that completes it."""
        if (TORCH_DTYPES.get(part.dtype), tuple(part.shape)) != (self._dtype, self._shape):
            raise IntegrityError("the parts of a tensor differ in dtype or shape")
        if part.offset != len(self._data):
            raise IntegrityError(f"a part has offset {part.offset} where {len(self._data)} bytes have arrived")
        self._data += part.data
        size = math.prod(self._shape) * self._dtype.itemsize
        if len(self._data) > size:
            raise IntegrityError(f"a tensor of {size} bytes got {len(self._data)}")
        return from_bytes(self._data, self._dtype, self._shape) if len(self._data) == size else None


@dataclass
class _SampleState:
    """What has arrived of one sample."""

    next_step: int
    digest: Any = field(default_factory=xxhash.xxh64)
    tensors: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    assembly: tuple[tuple[str, int], _Assembly] | None = None
    media: list[Tensor] = field(default_factory=list)
    media_assembly: _Assembly | None = None
    steps: int = 0
    ended: bool = False
    failed: bool = False


class EventDecoder:
    """Decodes and verifies the responses of one stream.

    Args:
        request: what was asked for.

    Raises:
        IntegrityError: from every method, when what arrived is not what was promised.
    """

    def __init__(self, request: pb.GenerateRolloutRequest) -> None:
        self._request = request
        self._sequence = 0
        self._samples: list[_SampleState] = []
        self._started: Started | None = None
        self._conditioning: dict[int, list[ConditioningEntry]] = {}
        self._conditioning_assembly: _Assembly | None = None
        self._accepted: pb.RolloutAccepted | None = None
        self._tensor_bytes = 0
        self.finished = False

    def feed(self, response: pb.GenerateRolloutResponse) -> Iterator[Event]:
        """The events that a response completes."""
        if response.sequence != self._sequence:
            raise IntegrityError(f"event {self._sequence} is missing: got {response.sequence}")
        if self.finished:
            raise IntegrityError("an event after the end of the rollout")
        self._sequence += 1
        kind = response.WhichOneof("event")
        if (kind == "accepted") != (self._accepted is None):
            raise IntegrityError(f"the stream has {kind} where it should not")
        match kind:
            case "accepted":
                yield self._accept(response.accepted)
            case "started":
                yield self._start(response.started)
            case "conditioning":
                yield from self._condition(response.conditioning)
            case "step":
                yield from self._step(response.step)
            case "sample_finished":
                yield from self._finish_sample(response.sample_finished)
            case "finished":
                yield self._finish(response.finished)
            case _:
                raise IntegrityError("an event of a kind that this client does not know")

    def end(self) -> None:
        """The stream ended without an error: it must have ended with ``finished``."""
        if not self.finished:
            raise IntegrityError("the stream ended before the rollout did")

    def _accept(self, accepted: pb.RolloutAccepted) -> Accepted:
        expected = [
            (
                index,
                sample.seed,
                sample.initial_noise_seed if sample.HasField("initial_noise_seed") else sample.seed,
                sample.start_state.step_index,
            )
            for index, prompt in enumerate(self._request.prompts)
            for sample in expanded_samples(prompt)
        ]
        echoed = [(s.prompt_index, s.seed, s.initial_noise_seed, s.start_step) for s in accepted.samples]
        if echoed != expected:
            raise IntegrityError("the samples echoed are not those asked for")
        sampling, output = self._request.sampling, self._request.output
        if sampling.HasField("num_steps") and accepted.num_steps != sampling.num_steps:
            raise IntegrityError(f"{accepted.num_steps} steps are made where {sampling.num_steps} were asked for")
        if accepted.latents_dtype not in TORCH_DTYPES or output.latents_dtype not in (0, accepted.latents_dtype):
            raise IntegrityError("the wire dtype is not the one asked for")
        self._samples = [_SampleState(sample.start_step) for sample in accepted.samples]
        self._accepted = accepted
        return Accepted(accepted)

    def _start(self, started: pb.RolloutStarted) -> Started:
        assert self._accepted is not None
        sigmas = tuple(started.sigmas)
        if self._request.sampling.sigmas and sigmas != tuple(self._request.sampling.sigmas):
            raise IntegrityError("the schedule is not the one asked for")
        if len(sigmas) != self._accepted.num_steps + 1:
            raise IntegrityError(f"the schedule has {len(sigmas)} values for {self._accepted.num_steps} steps")
        sampling = self._request.sampling
        stochastic = tuple(started.stochastic_step_indices)
        chosen = sampling.stochastic_step_indices.indices
        if sampling.HasField("stochastic_step_indices") and not set(stochastic) <= set(chosen):
            raise IntegrityError("steps are stochastic that were not to be")
        indices = tuple(started.latents_indices)
        if indices != self._asked_indices(len(sigmas) - 1, stochastic):
            raise IntegrityError(f"the latents that come back are not those asked for: {indices}")
        self._started = Started(started.policy_version, sigmas, stochastic, indices)
        return self._started

    def _asked_indices(self, num_steps: int, stochastic: tuple[int, ...]) -> tuple[int, ...]:
        output = self._request.output
        if output.WhichOneof("latents") == "latents_indices":
            return tuple(output.latents_indices.indices)
        match output.latents_selection:
            case pb.LATENTS_SELECTION_STOCHASTIC:
                return tuple(sorted({i for k in stochastic for i in (k, k + 1)}))
            case pb.LATENTS_SELECTION_FINAL:
                return (num_steps,)
            case pb.LATENTS_SELECTION_NONE:
                return ()
        return tuple(range(num_steps + 1))

    def _condition(self, part: pb.Conditioning) -> Iterator[ConditioningReceived]:
        entries = self._conditioning.setdefault(part.prompt_index, [])
        value: Any = None
        if part.json_value:
            value = json.loads(part.json_value)
        elif part.name:
            if self._conditioning_assembly is None:
                self._conditioning_assembly = _Assembly(part.tensor)
            value = self._conditioning_assembly.add(part.tensor)
            if value is None:
                return
            self._conditioning_assembly = None
        if part.name:
            entries.append(
                ConditioningEntry(part.call_index, part.component, part.name, value, part.batched, part.rows_per_sample)
            )
        if part.last:
            yield ConditioningReceived(part.prompt_index, tuple(self._conditioning.pop(part.prompt_index)))

    def _step(self, event: pb.StepEvent) -> Iterator[Step]:
        if self._started is None:
            raise IntegrityError("a step before the rollout has started")
        for tensor in event.tensors:
            state = self._sample(tensor.sample_index)
            key = (ROLES[tensor.role], tensor.index)
            if state.assembly is None:
                state.assembly = (key, _Assembly(tensor.tensor))
            if state.assembly[0] != key:
                raise IntegrityError(f"sample {tensor.sample_index}: {key} begins before {state.assembly[0]} is whole")
            whole = state.assembly[1].add(tensor.tensor)
            state.digest.update(tensor.tensor.data)
            self._tensor_bytes += len(tensor.tensor.data)
            if whole is not None:
                if key in state.tensors:
                    raise IntegrityError(f"sample {tensor.sample_index}: {key} came twice")
                state.tensors[key] = whole
                state.assembly = None
        for step in event.steps:
            yield self._complete_step(step)

    def _sample(self, index: int) -> _SampleState:
        if index >= len(self._samples) or self._samples[index].ended:
            raise IntegrityError(f"sample {index} is unknown or has ended")
        return self._samples[index]

    def _complete_step(self, message: pb.SampleStep) -> Step:
        assert self._started is not None
        assert self._accepted is not None
        sample, k = message.sample_index, message.step_index
        state = self._sample(sample)
        if k != state.next_step:
            raise IntegrityError(f"sample {sample}: step {k} arrived where step {state.next_step} is next")
        stochastic = k in self._started.stochastic_steps
        has_log_prob = message.HasField("log_prob")
        if has_log_prob != stochastic or (message.noise_std > 0) != stochastic:
            raise IntegrityError(
                f"sample {sample}, step {k}: a log-prob and a noise std must be there if and only if the step "
                "is stochastic"
            )
        if has_log_prob and not math.isfinite(message.log_prob):
            raise IntegrityError(f"sample {sample}, step {k}: the log-prob is {message.log_prob}")
        first = k == self._accepted.samples[sample].start_step
        if set(state.tensors) != self._promised(k, first, stochastic) or state.assembly is not None:
            raise IntegrityError(f"sample {sample}, step {k}: tensors {sorted(state.tensors)} are not those promised")
        wire = TORCH_DTYPES[self._accepted.latents_dtype]
        if any(role == "latents" and tensor.dtype != wire for (role, _), tensor in state.tensors.items()):
            raise IntegrityError(f"sample {sample}, step {k}: latents are not of the wire dtype {wire}")
        policy = self._request.policy
        version = message.policy_version
        if (policy.HasField("exactly") and version != policy.exactly) or version < policy.at_least:
            raise IntegrityError(
                f"sample {sample}, step {k}: made by policy version {version}, which was not asked for"
            )
        if has_log_prob:
            state.digest.update(np.float32(message.log_prob).tobytes())
        state.next_step += 1
        state.steps += 1
        tensors, state.tensors = state.tensors, {}
        log_prob = message.log_prob if has_log_prob else None
        return Step(sample, k, log_prob, message.noise_std, message.policy_version, tensors)

    def _promised(self, k: int, first: bool, stochastic: bool) -> set[tuple[str, int]]:
        assert self._started is not None
        output = self._request.output
        keys = {("latents", i) for i in ((k, k + 1) if first else (k + 1,)) if i in self._started.latents_indices}
        for role in ("noise", "mean", "velocity"):
            if getattr(output, role) and (role != "noise" or stochastic):
                keys.add((role, k))
        return keys

    def _finish_sample(self, message: pb.SampleFinished) -> Iterator[SampleFinished]:
        state = self._sample(message.sample_index)
        if message.HasField("media"):
            if state.media_assembly is None:
                state.media_assembly = _Assembly(message.media)
            whole = state.media_assembly.add(message.media)
            if whole is not None:
                state.media.append(whole)
                state.media_assembly = None
        if not message.last:
            return
        state.ended = True
        error = message.error if message.HasField("error") else None
        state.failed = error is not None
        if message.digest != state.digest.intdigest() or message.num_steps != state.steps:
            raise IntegrityError(
                f"sample {message.sample_index}: its digest or number of steps is not that of what arrived"
            )
        if error is None and self._accepted is not None and state.next_step != self._accepted.num_steps:
            raise IntegrityError(f"sample {message.sample_index}: ended at step {state.next_step} without an error")
        media: Tensor | tuple[bytes, ...] | None = None
        if state.media:
            is_raw = message.media_format == pb.MEDIA_FORMAT_RAW
            media = state.media[0] if is_raw else tuple(frame.numpy().tobytes() for frame in state.media)
            state.media = []
        yield SampleFinished(message.sample_index, error, media)

    def _finish(self, message: pb.RolloutFinished) -> Finished:
        if not all(state.ended for state in self._samples):
            raise IntegrityError("the rollout ended before all of its samples")
        digest = xxhash.xxh64(b"".join(s.digest.intdigest().to_bytes(8, "little") for s in self._samples)).intdigest()
        failed = sum(state.failed for state in self._samples)
        steps = sum(state.steps for state in self._samples)
        arrived = (len(self._samples) - failed, failed, steps, self._tensor_bytes, digest)
        told = (message.num_finished, message.num_failed, message.num_steps, message.tensor_bytes, message.digest)
        if arrived != told:
            raise IntegrityError(f"the rollout's counts or digest are not those of what arrived: {told}, {arrived}")
        self.finished = True
        return Finished(message)


def expanded_samples(prompt: pb.PromptRequest) -> list[pb.SampleRequest]:
    """The samples of a prompt, its seed range expanded."""
    if prompt.HasField("seed_range"):
        first = prompt.seed_range.seed
        return [pb.SampleRequest(seed=seed) for seed in range(first, first + prompt.seed_range.count)]
    return list(prompt.samples)
