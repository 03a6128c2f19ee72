"""Building a GenerateRolloutRequest from Python values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from torch import Tensor

from rollout_service.tensors import DATA_TYPES, to_message

from .errors import InvalidRequestError

#: eta where none is given: the value of the Flow-GRPO recipes.
DEFAULT_NOISE_LEVEL = 0.7

_SELECTIONS = {
    "all": pb.LATENTS_SELECTION_ALL,
    "stochastic": pb.LATENTS_SELECTION_STOCHASTIC,
    "final": pb.LATENTS_SELECTION_FINAL,
    "none": pb.LATENTS_SELECTION_NONE,
}


@dataclass(frozen=True)
class StartState:
    """A point of a trajectory to start from: resume, branch, or share a prefix."""

    step_index: int
    """k, the first step to run."""
    latents: Tensor
    """x_k without a batch dimension, in the wire dtype."""


@dataclass(frozen=True)
class Sample:
    """One sample to generate."""

    seed: int
    """In [0, 2^64)."""
    initial_noise_seed: int | None = None
    """Seed of x_0 where it differs from ``seed``."""
    start: StartState | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt and its samples."""

    prompt: str
    samples: tuple[Sample, ...]
    negative_prompt: str | None = None


def build_request(
    prompts: str | Sequence[str | Prompt],
    *,
    samples_per_prompt: int = 1,
    seed: int = 0,
    initial_noise_seed: int | None = None,
    negative_prompt: str | None = None,
    dynamics: str = "sde",
    noise_level: float | None = None,
    num_steps: int | None = None,
    sigmas: Sequence[float] | None = None,
    stochastic_step_indices: Sequence[int] | None = None,
    log_prob_kind: str | None = None,
    noise_mode: str | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    guidance_scale: float | None = None,
    arguments: Mapping[str, bool | int | float | str] | None = None,
    latents: str | Sequence[int] = "all",
    latents_dtype: torch.dtype = torch.float32,
    media: str = "none",
    conditioning: bool = False,
    debug: Sequence[str] = (),
    max_event_bytes: int | None = None,
    policy_exactly: int | None = None,
    policy_at_least: int | None = None,
    policy_max_wait: timedelta | None = None,
) -> pb.GenerateRolloutRequest:
    """Build a request. Values are checked by the server; only what the message cannot hold is refused here.

    Args:
        prompts: texts, or :class:`Prompt` objects with samples of their own.
        samples_per_prompt: samples of each prompt given as text.
        seed: seed of the first sample of the first such prompt; the next ones follow consecutively, over all prompts.
        initial_noise_seed: seed of the x_0 that all samples of prompts given as text share; None: each has its own.
        negative_prompt: of each prompt given as text.
        dynamics: ``ode``, ``sde``, ``dance`` or ``cps``.
        noise_level: eta; None is 0.7 for the stochastic dynamics.
        num_steps: T; None is the server's default, or follows from ``sigmas``.
        sigmas: T+1 noise levels, used verbatim (fp32).
        stochastic_step_indices: steps that inject noise; None is all.
        log_prob_kind: ``gaussian`` or ``squared_error``; None is the references' for the dynamics.
        noise_mode: ``keyed`` (None) or ``sequential``.
        height, width, num_frames, guidance_scale: None is the server's default.
        arguments: further arguments of the pipeline's call.
        latents: which x_k come back: ``all``, ``stochastic`` (x_k and x_{k+1} of each stochastic step), ``final``,
            ``none``, or absolute indices.
        latents_dtype: the wire dtype: float32, bfloat16 or float16.
        media: ``none``, ``raw`` (uint8) or ``png``.
        conditioning: whether to send what the denoiser receives besides latents and timestep.
        debug: any of ``noise``, ``mean``, ``velocity``.
        max_event_bytes: upper bound of one event.
        policy_exactly, policy_at_least, policy_max_wait: which policy version may run it.

    Raises:
        InvalidRequestError: a value that the request cannot hold.
    """
    request = pb.GenerateRolloutRequest()
    try:
        if initial_noise_seed is None:
            _add_prompts(request, prompts, samples_per_prompt, seed, negative_prompt)
        else:
            shared = _with_shared_noise(prompts, samples_per_prompt, seed, initial_noise_seed, negative_prompt)
            _add_prompts(request, shared, samples_per_prompt, seed, negative_prompt)
        sampling = request.sampling
        sampling.dynamics = _enum(pb.Dynamics, "DYNAMICS", dynamics, "dynamics")
        if noise_level is None and dynamics != "ode":
            noise_level = DEFAULT_NOISE_LEVEL
        _set(sampling, num_steps=num_steps, noise_level=noise_level)
        sampling.sigmas.extend(sigmas or ())
        if stochastic_step_indices is not None:
            sampling.stochastic_step_indices.indices[:] = stochastic_step_indices
            sampling.stochastic_step_indices.SetInParent()
        if log_prob_kind is not None:
            sampling.log_prob_kind = _enum(pb.LogProbKind, "LOG_PROB_KIND", log_prob_kind, "log_prob_kind")
        if noise_mode is not None:
            sampling.noise_mode = _enum(pb.NoiseMode, "NOISE_MODE", noise_mode, "noise_mode")
        _set(request.pipeline, height=height, width=width, num_frames=num_frames, guidance_scale=guidance_scale)
        for name, value in (arguments or {}).items():
            request.pipeline.arguments[name].CopyFrom(_argument(name, value))
        _add_output(request.output, latents, latents_dtype, media, debug)
        request.output.conditioning = conditioning
        _set(request.output, max_event_bytes=max_event_bytes)
        _set(request.policy, exactly=policy_exactly, at_least=policy_at_least)
        if policy_max_wait is not None:
            request.policy.max_wait.FromTimedelta(policy_max_wait)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot hold a value: {error}") from error
    return request


def _add_prompts(
    request: pb.GenerateRolloutRequest,
    prompts: str | Sequence[str | Prompt],
    samples_per_prompt: int,
    seed: int,
    negative_prompt: str | None,
) -> None:
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(prompt, str):
            added = request.prompts.add(prompt=prompt, negative_prompt=negative_prompt)
            added.seed_range.seed, added.seed_range.count = seed, samples_per_prompt
            seed += samples_per_prompt
            continue
        added = request.prompts.add(prompt=prompt.prompt, negative_prompt=prompt.negative_prompt)
        for sample in prompt.samples:
            entry = added.samples.add(seed=sample.seed, initial_noise_seed=sample.initial_noise_seed)
            if sample.start is not None:
                entry.start_state.step_index = sample.start.step_index
                entry.start_state.latents.CopyFrom(to_message(sample.start.latents.cpu()))


def _with_shared_noise(
    prompts: str | Sequence[str | Prompt], count: int, seed: int, initial_noise_seed: int, negative_prompt: str | None
) -> list[str | Prompt]:
    """The prompts given as text with explicit samples that share their x_0."""
    shared: list[str | Prompt] = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(prompt, str):
            samples = tuple(Sample(seed + i, initial_noise_seed) for i in range(count))
            seed += count
            shared.append(Prompt(prompt, samples, negative_prompt))
        else:
            shared.append(prompt)
    return shared


def _add_output(
    output: pb.OutputSettings, latents: str | Sequence[int], dtype: torch.dtype, media: str, debug: Sequence[str]
) -> None:
    if isinstance(latents, str):
        if latents not in _SELECTIONS:
            raise InvalidRequestError(f"latents: {latents!r} is unknown; pass {', '.join(_SELECTIONS)} or indices")
        output.latents_selection = _SELECTIONS[latents]
    else:
        output.latents_indices.indices[:] = latents
        output.latents_indices.SetInParent()
    if dtype not in DATA_TYPES:
        raise InvalidRequestError(f"latents_dtype: {dtype} is unknown; pass torch.float32, bfloat16 or float16")
    output.latents_dtype = DATA_TYPES[dtype]  # type: ignore[assignment]
    output.media = _enum(pb.MediaFormat, "MEDIA_FORMAT", media, "media")
    for name in debug:
        if name not in ("noise", "mean", "velocity"):
            raise InvalidRequestError(f"debug: {name!r} is unknown; pass any of noise, mean, velocity")
        setattr(output, name, True)


def _set(message: Any, **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


def _enum(enum: Any, prefix: str, value: str, field: str) -> Any:
    names = [name.removeprefix(f"{prefix}_").lower() for name in enum.keys()[1:]]
    if value not in names:
        raise InvalidRequestError(f"{field}: {value!r} is unknown; pass one of {', '.join(names)}", field=field)
    return enum.Value(f"{prefix}_{value.upper()}")


def _argument(name: str, value: object) -> pb.ArgumentValue:
    if isinstance(value, bool):
        return pb.ArgumentValue(bool_value=value)
    if isinstance(value, int):
        return pb.ArgumentValue(int_value=value)
    if isinstance(value, float):
        return pb.ArgumentValue(double_value=value)
    if isinstance(value, str):
        return pb.ArgumentValue(string_value=value)
    raise InvalidRequestError(f"arguments[{name}]: {type(value).__name__} cannot be sent; pass bool, int, float or str")
