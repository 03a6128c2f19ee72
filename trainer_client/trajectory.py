"""A whole rollout as tensors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import IntegrityError, RolloutError
from .events import (
    Accepted,
    ConditioningEntry,
    ConditioningReceived,
    Event,
    Finished,
    SampleFinished,
    Started,
    Step,
)
from .request import StartState

_FORMAT = "diffusion-rollout-trajectory-1"


@dataclass
class Trajectory:
    """The trajectories of all B samples of a rollout, with absolute indices.

    What a failed sample, or one that starts at a later step, does not have is NaN (-1 for integers).
    """

    request: pb.GenerateRolloutRequest
    """What was asked for (tensors of start states dropped)."""
    accepted: pb.RolloutAccepted
    """What it resolved to: seeds, prompt of each sample, pipeline arguments."""
    sigmas: Tensor
    """fp32 [T+1]."""
    latents_indices: tuple[int, ...]
    """N absolute indices."""
    latents: Tensor
    """x_k for k in ``latents_indices``: [B, N, ...] in the wire dtype."""
    stochastic_steps: tuple[int, ...]
    """S step indices."""
    log_probs: Tensor
    """fp32 [B, S]."""
    noise_std: Tensor
    """fp32 [T]; 0 for a deterministic step."""
    policy_versions: Tensor
    """int64 [B, T]."""
    noise: Tensor | None = None
    """fp32 [B, S, ...], if asked for."""
    mean: Tensor | None = None
    """fp32 [B, T, ...], if asked for."""
    velocity: Tensor | None = None
    """[B, T, ...], if asked for."""
    conditioning: dict[int, tuple[ConditioningEntry, ...]] = field(default_factory=dict)
    """By prompt index, if asked for."""
    media: dict[int, Tensor | tuple[bytes, ...]] = field(default_factory=dict)
    """By sample index, if asked for: uint8 [(frames,) height, width, 3], or PNG files."""
    errors: dict[int, pb.SampleError] = field(default_factory=dict)
    """By sample index, of the samples that failed."""
    finished: pb.RolloutFinished = field(default_factory=pb.RolloutFinished)
    """Counts, digest and timings."""

    def __len__(self) -> int:
        return len(self.accepted.samples)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    @property
    def ok(self) -> Tensor:
        """bool [B]: which samples did not fail."""
        return torch.tensor([index not in self.errors for index in range(len(self))])

    @property
    def seeds(self) -> tuple[int, ...]:
        """One per sample."""
        return tuple(sample.seed for sample in self.accepted.samples)

    @property
    def prompt_indices(self) -> tuple[int, ...]:
        """The prompt of each sample."""
        return tuple(sample.prompt_index for sample in self.accepted.samples)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt text of each sample."""
        return tuple(self.request.prompts[index].prompt for index in self.prompt_indices)

    def latents_at(self, k: int) -> Tensor:
        """x_k of all samples, [B, ...].

        Raises:
            KeyError: x_k was not asked for.
        """
        if k not in self.latents_indices:
            raise KeyError(f"x_{k} was not returned; ask for it with latents=...")
        return self.latents[:, self.latents_indices.index(k)]

    def start_state(self, sample: int, k: int) -> StartState:
        """Where ``sample`` was at x_k: to resume or branch from."""
        return StartState(k, self.latents_at(k)[sample])

    def images(self) -> list[Image.Image]:
        """The decoded media as PIL images: of each sample in order, each frame.

        Raises:
            RolloutError: no media were asked for, or samples failed.
        """
        if len(self.media) != len(self):
            raise RolloutError("not every sample has media: ask for media='png' or 'raw', and see errors")
        return [image for sample in range(len(self)) for image in _pil(self.media[sample])]

    # -- files

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        tensors = {
            name: value.contiguous()
            for name in ("sigmas", "latents", "log_probs", "noise_std", "policy_versions", "noise", "mean", "velocity")
            if (value := getattr(self, name)) is not None
        }
        conditioning = []
        for prompt, entries in self.conditioning.items():
            for entry in entries:
                head = {name: getattr(entry, name) for name in _CONDITIONING_HEAD} | {"prompt_index": prompt}
                if isinstance(entry.value, Tensor):
                    head["tensor"] = f"conditioning.{len(conditioning)}"
                    tensors[head["tensor"]] = entry.value.contiguous()
                else:
                    head["value"] = entry.value
                conditioning.append(head)
        media: dict[str, int] = {}
        for sample, value in self.media.items():
            if isinstance(value, Tensor):
                tensors[f"media.{sample}"] = value.contiguous()
                continue
            media[str(sample)] = len(value)
            for number, png in enumerate(value):
                tensors[f"media.{sample}.{number}"] = torch.frombuffer(bytearray(png), dtype=torch.uint8)
        metadata = {
            "format": _FORMAT,
            "request": _encode(self.request),
            "accepted": _encode(self.accepted),
            "finished": _encode(self.finished),
            "errors": json.dumps({sample: _encode(error) for sample, error in self.errors.items()}),
            "latents_indices": json.dumps(self.latents_indices),
            "stochastic_steps": json.dumps(self.stochastic_steps),
            "conditioning": json.dumps(conditioning),
            "png_frames": json.dumps(media),
        }
        save_file(tensors, str(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> Trajectory:
        """Read a file that :meth:`save` wrote.

        Raises:
            RolloutError: it is not one.
        """
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises its own kinds
            raise RolloutError(f"{path}: cannot be read as safetensors: {error}") from error
        if metadata.get("format") != _FORMAT:
            raise RolloutError(f"{path}: is not a saved trajectory (metadata format is {metadata.get('format')!r})")
        conditioning: dict[int, tuple[ConditioningEntry, ...]] = {}
        for head in json.loads(metadata["conditioning"]):
            value = tensors.pop(head["tensor"]) if "tensor" in head else head["value"]
            entry = ConditioningEntry(**{name: head[name] for name in _CONDITIONING_HEAD}, value=value)
            conditioning[head["prompt_index"]] = (*conditioning.get(head["prompt_index"], ()), entry)
        media: dict[int, Tensor | tuple[bytes, ...]] = {}
        for sample, frames in json.loads(metadata["png_frames"]).items():
            media[int(sample)] = tuple(tensors.pop(f"media.{sample}.{n}").numpy().tobytes() for n in range(frames))
        for name in [name for name in tensors if name.startswith("media.")]:
            media[int(name.removeprefix("media."))] = tensors.pop(name)
        return cls(
            request=pb.GenerateRolloutRequest.FromString(base64.b64decode(metadata["request"])),
            accepted=pb.RolloutAccepted.FromString(base64.b64decode(metadata["accepted"])),
            finished=pb.RolloutFinished.FromString(base64.b64decode(metadata["finished"])),
            errors={
                int(sample): pb.SampleError.FromString(base64.b64decode(error))
                for sample, error in json.loads(metadata["errors"]).items()
            },
            latents_indices=tuple(json.loads(metadata["latents_indices"])),
            stochastic_steps=tuple(json.loads(metadata["stochastic_steps"])),
            conditioning=conditioning,
            media=dict(sorted(media.items())),
            **tensors,
        )


_CONDITIONING_HEAD = ("call_index", "component", "name", "batched", "rows_per_sample")


def _encode(message: Any) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _pil(media: Tensor | tuple[bytes, ...]) -> list[Image.Image]:
    if isinstance(media, tuple):
        return [Image.open(io.BytesIO(png)).convert("RGB") for png in media]
    frames = media if media.ndim == 4 else media[None]
    return [Image.fromarray(frame.numpy()) for frame in frames]


class TrajectoryBuilder:
    """Collects events into a :class:`Trajectory`; each tensor is copied once, to its place."""

    def __init__(self, request: pb.GenerateRolloutRequest) -> None:
        self._request = pb.GenerateRolloutRequest()
        self._request.CopyFrom(request)
        for prompt in self._request.prompts:
            for sample in prompt.samples:
                if sample.HasField("start_state"):
                    sample.start_state.ClearField("latents")
        self._accepted = pb.RolloutAccepted()
        self._started = Started(0, (), (), ())
        self._tensors: dict[str, Tensor] = {}
        self._conditioning: dict[int, tuple[ConditioningEntry, ...]] = {}
        self._media: dict[int, Tensor | tuple[bytes, ...]] = {}
        self._errors: dict[int, pb.SampleError] = {}
        self._finished: pb.RolloutFinished | None = None

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case Accepted(message):
                self._accepted = message
            case Started():
                self._start(event)
            case ConditioningReceived(prompt_index, entries):
                self._conditioning[prompt_index] = entries
            case Step():
                self._step(event)
            case SampleFinished(sample, error, media):
                if error is not None:
                    self._errors[sample] = error
                if media is not None:
                    self._media[sample] = media
            case Finished(message):
                self._finished = message

    def _start(self, started: Started) -> None:
        self._started = started
        samples, steps = len(self._accepted.samples), len(started.sigmas) - 1
        self._tensors["log_probs"] = torch.full((samples, len(started.stochastic_steps)), torch.nan)
        self._tensors["policy_versions"] = torch.full((samples, steps), -1, dtype=torch.int64)
        self._tensors["noise_std"] = torch.zeros(steps)

    def _places(self, role: str) -> Sequence[int]:
        """The absolute indices along dimension 1 of a role's tensor."""
        if role == "latents":
            return self._started.latents_indices
        return self._started.stochastic_steps if role == "noise" else range(len(self._started.sigmas) - 1)

    def _step(self, step: Step) -> None:
        sample, k = step.sample_index, step.step_index
        self._tensors["policy_versions"][sample, k] = step.policy_version
        self._tensors["noise_std"][k] = step.noise_std
        if step.log_prob is not None:
            self._tensors["log_probs"][sample, self._started.stochastic_steps.index(k)] = step.log_prob
        for (role, index), tensor in step.tensors.items():
            places = self._places(role)
            if role not in self._tensors:
                shape = (len(self._accepted.samples), len(places), *tensor.shape)
                self._tensors[role] = torch.full(shape, torch.nan, dtype=tensor.dtype)
            whole = self._tensors[role]
            if whole.shape[2:] != tensor.shape or whole.dtype != tensor.dtype:
                raise IntegrityError(f"sample {sample}, step {k}: {role} has another shape or dtype than before")
            whole[sample, places.index(index)] = tensor

    def build(self) -> Trajectory:
        """The trajectory, once the rollout has finished.

        Raises:
            RolloutError: every sample failed before its first step, so there is no trajectory.
        """
        if self._finished is None:
            raise IntegrityError("the rollout has not finished")
        if not self._started.sigmas:
            first = next(iter(self._errors.values()))
            raise RolloutError(f"every sample failed before its first step: {first.message}", "PIPELINE_ERROR")
        samples = len(self._accepted.samples)
        latents = self._tensors.pop("latents", None)
        return Trajectory(
            request=self._request,
            accepted=self._accepted,
            sigmas=torch.tensor(self._started.sigmas),
            latents_indices=self._started.latents_indices,
            latents=latents if latents is not None else torch.empty(samples, 0),
            stochastic_steps=self._started.stochastic_steps,
            conditioning=self._conditioning,
            media=dict(sorted(self._media.items())),
            errors=self._errors,
            finished=self._finished,
            **self._tensors,
        )
