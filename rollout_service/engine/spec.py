"""What a rollout is once its request has been parsed and validated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollout_service.scheduler import RolloutArgs

LatentsSelection = Literal["all", "stochastic", "final", "none"]
Media = Literal["none", "raw", "png"]


@dataclass(frozen=True)
class PromptSpec:
    """One prompt."""

    prompt: str
    negative_prompt: str | None
    """None is the pipeline's default."""


@dataclass(frozen=True)
class SampleSpec:
    """One sample, in order of ``sample_index``."""

    prompt_index: int
    seed: int
    initial_noise_seed: int | None
    """Seed of x_0; None is ``seed``."""
    start_step: int
    """First step to run; its x_k is given beside the spec if ``starts_from_latents``."""
    starts_from_latents: bool


@dataclass(frozen=True)
class RolloutSpec:
    """One rollout, ready for the engine: nothing in it needs checking again."""

    rollout_id: str
    prompts: tuple[PromptSpec, ...]
    samples: tuple[SampleSpec, ...]
    args: RolloutArgs
    num_steps: int
    call_arguments: dict[str, Any]
    """Further arguments of the pipeline's call: size, guidance, ..."""
    latents: LatentsSelection | tuple[int, ...]
    """Which x_k come back; indices are absolute, in [0, T]."""
    media: Media
    conditioning: bool
    buffer_bytes: int
    """Bytes that may be under way to the reader before the rollout's samples are parked."""
    policy_version: int = 0
    """The version that it starts on."""
    policy_pinned: bool = False
    """Whether it demands exactly this version, so that an activation does not switch it."""
    policy_minimum: int = 0
    """The lowest version that an activation may switch it to."""

    def may_switch_to(self, version: int) -> bool:
        """Whether an activation with NEXT_STEP moves it to ``version``."""
        return not self.policy_pinned and version >= self.policy_minimum

    def wanted_latents(self, sigmas: tuple[float, ...]) -> tuple[int, ...]:
        """The absolute indices of the latents that come back, given the schedule in force."""
        if isinstance(self.latents, tuple):
            return self.latents
        if self.latents == "stochastic":
            stochastic = self.args.stochastic_steps(sigmas)
            return tuple(sorted({k for step in stochastic for k in (step, step + 1)}))
        last = len(sigmas) - 1
        return {"all": tuple(range(last + 1)), "final": (last,), "none": ()}[self.latents]

    def to_fields(self) -> dict[str, Any]:
        """As a JSON-ready dict."""
        fields = dataclasses.asdict(self)
        dtype = self.args.latents_dtype
        fields["args"]["latents_dtype"] = dtype and str(dtype).removeprefix("torch.")
        return fields

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> RolloutSpec:
        """Undo :meth:`to_fields` (after a round trip through JSON)."""
        args: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields["args"].items()}
        if args["latents_dtype"]:
            args["latents_dtype"] = getattr(torch, args["latents_dtype"])
        latents = fields["latents"]
        return RolloutSpec(
            **{
                **fields,
                "prompts": tuple(PromptSpec(**prompt) for prompt in fields["prompts"]),
                "samples": tuple(SampleSpec(**sample) for sample in fields["samples"]),
                "args": RolloutArgs(**args),
                "latents": tuple(latents) if isinstance(latents, list) else latents,
            }
        )
