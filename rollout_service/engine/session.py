"""A session: one call of an unmodified pipeline, run as a coroutine that parks at each denoiser call.

The samples of one prompt that start at the same step share a session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from rollout_service.models.merge_table import MERGE_TABLE
from rollout_service.scheduler import StepRecord, clone_pipeline, rollout_scheduler
from rollout_service.scheduler.mixin import RolloutFlowMatchEulerDiscreteScheduler
from rollout_service.scheduler.pipeline import images_per_prompt_argument
from rollout_service.tensors import DATA_TYPES

from .batching import DenoiserCall, is_plain
from .prompt_cache import PromptCache
from .spec import RolloutSpec


class SessionCancelled(BaseException):
    """Thrown into a parked pipeline to end it. Not an Exception, so that no pipeline swallows it."""


@dataclass(frozen=True)
class SessionSamples:
    """Which samples of a rollout a session runs."""

    spec: RolloutSpec
    prompt_index: int
    sample_indices: tuple[int, ...]
    start_step: int
    start_latents: Tensor | None
    """x_k of all samples, [K, ...] in the wire dtype; None to draw x_0."""


@dataclass(frozen=True)
class CapturedConditioning:
    """One denoiser argument besides latents and timestep, reduced to one sample's rows."""

    call_index: int
    component: str
    name: str
    rows_per_sample: int
    value: Any
    """A tensor, or a plain value."""
    batched: bool


@dataclass(eq=False)
class Session:
    """Runs one pipeline call. ``advance`` starts it, then resumes it with the result of the denoiser call at which
    it parked.
    """

    pipe: DiffusionPipeline
    samples: SessionSamples
    prompt_cache: PromptCache
    on_step: Callable[[Session, StepRecord], None]
    policy_version: int = 0
    """The version that runs its current step."""
    next_version: int | None = None
    """The version that it switches to at its next step boundary."""
    calls_in_step: int = 0
    """Denoiser calls that have been answered since the last step: 0 at a step boundary."""
    call: DenoiserCall | None = None
    """The denoiser call at which it is parked; None before the start and after the end."""
    media: Tensor | None = None
    """uint8 [K, (frames,) height, width, 3] on the device, once it has ended, if the rollout asked for media."""
    media_finite: Tensor | None = None
    """bool [K]: whether all of a sample's decoded values are finite."""
    step_bytes: int = 0
    """Bytes that its last step handed out: what its next step will need of the stream's buffer."""
    next_step: int = 0
    """The absolute step that it will make next."""
    conditioning_calls: list[DenoiserCall] = field(default_factory=list)
    """The denoiser calls of its first step, if the rollout asked for conditioning."""

    def __post_init__(self) -> None:
        self.scheduler: RolloutFlowMatchEulerDiscreteScheduler = rollout_scheduler(self.pipe)
        self._greenlet: greenlet | None = None
        self._wanted_latents: frozenset[int] | None = None
        self._first_step_done = False
        self.next_step = self.samples.start_step
        self._shared_keys: dict[str, dict[str, tuple[Tensor, int]]] = {}

    @property
    def wanted_latents(self) -> frozenset[int]:
        """Absolute indices of the latents that come back; known once the pipeline has made its schedule."""
        if self._wanted_latents is None:
            self._wanted_latents = frozenset(self.samples.spec.wanted_latents(self.scheduler.rollout_sigmas))
        return self._wanted_latents

    def advance(self, output: Any = None) -> bool:
        """Run to the next denoiser call, or to the end; ``output`` is the result of the call it is parked at.

        Returns:
            Whether it is parked again (otherwise it has ended).

        Raises:
            Exception: whatever the pipeline raised.
        """
        if self._greenlet is None:
            self._greenlet = greenlet(self._run)
            parked = self._greenlet.switch()
        else:
            self.call = None
            self.calls_in_step += 1
            parked = self._greenlet.switch(output)
        self.call = parked if isinstance(parked, DenoiserCall) else None
        return self.call is not None

    def cancel(self) -> None:
        """End it where it is parked."""
        self.call = None
        if self._greenlet is not None and not self._greenlet.dead:
            with contextlib.suppress(SessionCancelled):
                self._greenlet.throw(SessionCancelled)

    def _park(self, component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
        call = DenoiserCall(component, module, arguments, self._shared_keys.setdefault(component, {}))
        if self.samples.spec.conditioning and not self._first_step_done:
            self.conditioning_calls.append(call)
        parent = getcurrent().parent
        assert parent is not None
        return parent.switch(call)

    def _run(self) -> None:
        samples, spec = self.samples, self.samples.spec
        own = [spec.samples[index] for index in samples.sample_indices]
        noise = self.scheduler.prepare_rollout(
            spec.args,
            [sample.seed for sample in own],
            initial_noise_seeds=[sample.initial_noise_seed for sample in own],
            start_step=samples.start_step,
            sink=self._on_record,
        )
        clone: Any = clone_pipeline(
            self.pipe,
            self.scheduler,
            run=self._park,
            latents_dtype=spec.args.latents_dtype,
            start_latents=samples.start_latents,
        )
        if hasattr(clone, "encode_prompt"):
            clone.encode_prompt = self.prompt_cache.wrap(clone.encode_prompt)
        prompt = spec.prompts[samples.prompt_index]
        arguments = dict(spec.call_arguments)
        if prompt.negative_prompt is not None:
            arguments["negative_prompt"] = prompt.negative_prompt
        (output, *_) = clone(
            prompt=prompt.prompt,
            num_inference_steps=spec.num_steps,
            generator=noise.initial_generators(),
            output_type="latent" if spec.media == "none" else "pt",
            return_dict=False,
            **{images_per_prompt_argument(type(clone)): len(own)},
            **arguments,
        )
        if spec.media != "none":
            decoded = output if isinstance(output, Tensor) else torch.stack(list(output))
            self.media_finite = torch.isfinite(decoded).flatten(1).all(1)
            self.media = to_uint8(decoded)

    def _on_record(self, record: StepRecord) -> None:
        self._first_step_done = True
        self.calls_in_step = 0
        self.on_step(self, record)

    def captured_conditioning(self) -> list[CapturedConditioning]:
        """What the denoiser received in the first step besides latents and timestep, reduced to one sample's rows.

        Raises:
            ValueError: an argument is neither a tensor that can be sent nor a plain value.
        """
        captured = []
        for call_index, call in enumerate(self.conditioning_calls):
            rows_per_sample = max(1, call.rows // len(self.samples.sample_indices))
            for name, value in call.arguments.items():
                if name in ("hidden_states", "timestep", "return_dict") or value is None:
                    continue
                if not is_plain(value) and not (isinstance(value, Tensor) and value.dtype in DATA_TYPES):
                    raise ValueError(f"conditioning: {call.component}'s argument {name} cannot be sent; ask without it")
                rule = MERGE_TABLE.get(type(call.module).__name__)
                may_batch = isinstance(value, Tensor) and value.ndim > 0 and not (rule and name in rule.shared)
                batched = may_batch and value.shape[0] == call.rows
                if batched:
                    value = _one_sample(value, len(self.samples.sample_indices))
                    batched = value.shape[0] == rows_per_sample
                captured.append(CapturedConditioning(call_index, call.component, name, rows_per_sample, value, batched))
        return captured


def _one_sample(value: Tensor, samples: int) -> Tensor:
    """Of [C * K, ...] ordered branch by branch, the rows of the first sample, where all samples' rows are equal."""
    branches = value.unflatten(0, (-1, samples))
    one = branches[:, :1]
    return one[:, 0] if torch.equal(one.expand_as(branches), branches) else value


def to_uint8(images: Tensor) -> Tensor:
    """Decoded media in [0, 1], [K, 3, H, W] or [K, F, 3, H, W], as uint8 with channels last; as diffusers rounds."""
    return (images.float() * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).contiguous()
