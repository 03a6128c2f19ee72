"""From a GenerateRolloutRequest to a RolloutSpec: everything that can be checked before the queue is checked here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import tensor_pb2
from torch import Tensor

from rollout_service.config import MAX_EVENT_BYTES, MIN_EVENT_BYTES, ServerConfig
from rollout_service.engine.spec import LatentsSelection, Media, PromptSpec, RolloutSpec, SampleSpec
from rollout_service.models.loading import PipelineFacts
from rollout_service.scheduler import RolloutArgs, RolloutArgsError
from rollout_service.scheduler.args import validate_indices
from rollout_service.tensors import TORCH_DTYPES, from_message

from .errors import invalid, over_limit

_DYNAMICS = {pb.DYNAMICS_ODE: "ode", pb.DYNAMICS_SDE: "sde", pb.DYNAMICS_DANCE: "dance", pb.DYNAMICS_CPS: "cps"}
_LOG_PROB_KINDS = {
    pb.LOG_PROB_KIND_UNSPECIFIED: None,
    pb.LOG_PROB_KIND_GAUSSIAN: "gaussian",
    pb.LOG_PROB_KIND_SQUARED_ERROR: "squared_error",
}
_NOISE_MODES = {
    pb.NOISE_MODE_UNSPECIFIED: "keyed",
    pb.NOISE_MODE_KEYED: "keyed",
    pb.NOISE_MODE_SEQUENTIAL: "sequential",
}
_SELECTIONS: dict[int, LatentsSelection] = {
    pb.LATENTS_SELECTION_UNSPECIFIED: "all",
    pb.LATENTS_SELECTION_ALL: "all",
    pb.LATENTS_SELECTION_STOCHASTIC: "stochastic",
    pb.LATENTS_SELECTION_FINAL: "final",
    pb.LATENTS_SELECTION_NONE: "none",
}
_MEDIA: dict[int, Media] = {
    pb.MEDIA_FORMAT_UNSPECIFIED: "none",
    pb.MEDIA_FORMAT_NONE: "none",
    pb.MEDIA_FORMAT_RAW: "raw",
    pb.MEDIA_FORMAT_PNG: "png",
}
_LATENTS_DTYPES = {
    tensor_pb2.DATA_TYPE_UNSPECIFIED: torch.float32,
    tensor_pb2.DATA_TYPE_FLOAT32: torch.float32,
    tensor_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DATA_TYPE_FLOAT16: torch.float16,
}
#: Where the settings of RolloutArgs stand in a request.
_ARGS_FIELDS = {"latents_dtype": "output.latents_dtype"}


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can run."""

    spec: RolloutSpec
    start_latents: dict[int, Tensor]
    """By sample index, x_k in the wire dtype without a batch dimension."""
    max_event_bytes: int


def parse_request(
    request: pb.GenerateRolloutRequest, rollout_id: str, facts: PipelineFacts, config: ServerConfig
) -> ParsedRequest:
    """Parse and check a request.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if request.ByteSize() > config.max_request_bytes:
        raise over_limit("prompts", request.ByteSize(), "max_request_bytes", config.max_request_bytes)
    output, sampling = request.output, request.sampling
    latents_dtype = _choose(output.latents_dtype, "output.latents_dtype", _LATENTS_DTYPES)
    args, num_steps = _parse_sampling(sampling, output, latents_dtype, facts, config)
    prompts = tuple(_parse_prompt(p, f"prompts[{i}]", facts, config) for i, p in enumerate(_prompts(request, config)))
    samples, start_latents = _parse_samples(request, num_steps, args, config)
    _check_policy(request)
    max_event_bytes = output.max_event_bytes if output.HasField("max_event_bytes") else config.default_event_bytes
    if max_event_bytes > MAX_EVENT_BYTES:
        raise over_limit("output.max_event_bytes", max_event_bytes, "max_event_bytes", MAX_EVENT_BYTES)
    if max_event_bytes < MIN_EVENT_BYTES:
        raise invalid(
            "output.max_event_bytes", f"{max_event_bytes} is out of range; pass {MIN_EVENT_BYTES} to {MAX_EVENT_BYTES}"
        )
    spec = RolloutSpec(
        rollout_id=rollout_id,
        prompts=prompts,
        samples=samples,
        args=args,
        num_steps=num_steps,
        call_arguments=_parse_pipeline(request.pipeline, facts, config),
        latents=_parse_latents(output, num_steps),
        media=_choose(output.media, "output.media", _MEDIA),
        conditioning=output.conditioning,
        buffer_bytes=config.stream_buffer_bytes,
    )
    needed = _echo_bytes(spec)
    if needed > max_event_bytes:
        raise invalid(
            "output.max_event_bytes",
            f"{max_event_bytes} is too small for the echo of this rollout; pass at least {needed}, or send less",
        )
    return ParsedRequest(spec, start_latents, max_event_bytes)


def _echo_bytes(spec: RolloutSpec) -> int:
    """Upper bound of the events that are not split: `accepted` (a line per sample, the pipeline's arguments) and
    `started` (4 bytes per sigma, up to 3 per index).
    """
    arguments = sum(
        len(name) + (len(value.encode()) if isinstance(value, str) else 9) + 16
        for name, value in spec.call_arguments.items()
    )
    return max(256 + 36 * len(spec.samples) + arguments, 128 + 10 * (spec.num_steps + 1))


def _choose(value: int, field: str, choices: Mapping[Any, Any]) -> Any:
    if value not in choices:
        raise invalid(field, f"{value} is not a known value; pass one that the protocol names and this field allows")
    return choices[value]


def _prompts(request: pb.GenerateRolloutRequest, config: ServerConfig) -> Iterable[pb.PromptRequest]:
    if not request.prompts:
        raise invalid("prompts", "none given; pass at least one prompt")
    if len(request.prompts) > config.max_prompts:
        raise over_limit("prompts", len(request.prompts), "max_prompts", config.max_prompts)
    return request.prompts


def _parse_prompt(prompt: pb.PromptRequest, field: str, facts: PipelineFacts, config: ServerConfig) -> PromptSpec:
    _check_text(prompt.prompt, f"{field}.prompt", config)
    negative = prompt.negative_prompt if prompt.HasField("negative_prompt") else None
    if negative is not None:
        if not facts.has_negative_prompt:
            raise invalid(f"{field}.negative_prompt", f"{facts.pipeline_class} takes none; leave it out")
        _check_text(negative, f"{field}.negative_prompt", config)
    return PromptSpec(prompt.prompt, negative)


def _check_text(text: str, field: str, config: ServerConfig) -> None:
    size = len(text.encode())
    if size > config.max_prompt_bytes:
        raise over_limit(field, size, "max_prompt_bytes", config.max_prompt_bytes)


# -- sampling


def _parse_sampling(
    sampling: pb.SamplingSettings,
    output: pb.OutputSettings,
    latents_dtype: torch.dtype,
    facts: PipelineFacts,
    config: ServerConfig,
) -> tuple[RolloutArgs, int]:
    if sampling.dynamics == pb.DYNAMICS_UNSPECIFIED:
        raise invalid("sampling.dynamics", "not set; pass ODE, SDE, DANCE or CPS")
    sigmas = tuple(sampling.sigmas) or None
    if sampling.HasField("num_steps"):
        num_steps = sampling.num_steps
    else:
        num_steps = len(sigmas) - 1 if sigmas else facts.default_steps
    field = "sampling.num_steps" if sampling.HasField("num_steps") or not sigmas else "sampling.sigmas"
    if num_steps > config.max_steps:
        raise over_limit(field, num_steps, "max_steps", config.max_steps)
    if num_steps < 1:
        raise invalid(field, "gives no step; pass at least 1 step (T+1 sigmas)")
    has_indices = sampling.HasField("stochastic_step_indices")
    args = RolloutArgs(
        dynamics=_choose(sampling.dynamics, "sampling.dynamics", _DYNAMICS),
        noise_level=sampling.noise_level if sampling.HasField("noise_level") else None,
        log_prob_kind=_choose(sampling.log_prob_kind, "sampling.log_prob_kind", _LOG_PROB_KINDS),
        stochastic_step_indices=tuple(sampling.stochastic_step_indices.indices) if has_indices else None,
        sigmas=sigmas,
        noise_mode=_choose(sampling.noise_mode, "sampling.noise_mode", _NOISE_MODES),
        latents_dtype=latents_dtype,
        debug=tuple(name for name in ("noise", "mean", "velocity") if getattr(output, name)),
    )
    try:
        args.validate(num_steps)
    except RolloutArgsError as error:
        raise invalid(_ARGS_FIELDS.get(error.field, f"sampling.{error.field}"), error.problem) from error
    return args, num_steps


# -- samples


def _parse_samples(
    request: pb.GenerateRolloutRequest, num_steps: int, args: RolloutArgs, config: ServerConfig
) -> tuple[tuple[SampleSpec, ...], dict[int, Tensor]]:
    total = sum(len(p.samples) or p.seed_range.count for p in request.prompts)
    if total > config.samples_limit:
        raise over_limit("prompts", total, "max_samples", config.samples_limit)
    samples: list[SampleSpec] = []
    start_latents: dict[int, Tensor] = {}
    for prompt_index, prompt in enumerate(request.prompts):
        field = f"prompts[{prompt_index}]"
        if bool(prompt.samples) == prompt.HasField("seed_range"):
            raise invalid(f"{field}.samples", "pass exactly one of samples and seed_range")
        if prompt.HasField("seed_range"):
            seeds = _seed_range(prompt.seed_range, f"{field}.seed_range")
            samples += [SampleSpec(prompt_index, seed, None, 0, False) for seed in seeds]
            continue
        shape: tuple[int, ...] | None = None
        for position, sample in enumerate(prompt.samples):
            path = f"{field}.samples[{position}]"
            initial = sample.initial_noise_seed if sample.HasField("initial_noise_seed") else None
            if initial is not None and args.noise_mode == "sequential":
                raise invalid(f"{path}.initial_noise_seed", "not with sequential noise; pass keyed, or leave it out")
            start = 0
            if sample.HasField("start_state"):
                start = sample.start_state.step_index
                latents = _parse_start_state(sample.start_state, f"{path}.start_state", num_steps, args, shape)
                shape = tuple(latents.shape)
                start_latents[len(samples)] = latents
            samples.append(SampleSpec(prompt_index, sample.seed, initial, start, sample.HasField("start_state")))
    return tuple(samples), start_latents


def _seed_range(seed_range: pb.SeedRange, field: str) -> range:
    if seed_range.count < 1:
        raise invalid(f"{field}.count", "0 samples; pass at least 1")
    if seed_range.seed + seed_range.count > 1 << 64:
        raise invalid(f"{field}.seed", "the range passes 2^64; pass a smaller seed or count")
    return range(seed_range.seed, seed_range.seed + seed_range.count)


def _parse_start_state(
    state: pb.StartState, field: str, num_steps: int, args: RolloutArgs, shape: tuple[int, ...] | None
) -> Tensor:
    if state.step_index >= num_steps:
        raise invalid(f"{field}.step_index", f"{state.step_index} is out of range; pass 0 to {num_steps - 1}")
    path = f"{field}.latents"
    if TORCH_DTYPES.get(state.latents.dtype) != args.latents_dtype:
        raise invalid(
            f"{path}.dtype", "is not the wire dtype; pass latents as the service sends them (output.latents_dtype)"
        )
    if not state.latents.shape or 0 in state.latents.shape or len(state.latents.shape) > 8:
        raise invalid(f"{path}.shape", "pass the shape in which the service sends latents, without a batch dimension")
    if shape is not None and tuple(state.latents.shape) != shape:
        raise invalid(f"{path}.shape", f"differs from the shape {list(shape)} of an earlier sample of the prompt")
    try:
        latents = from_message(state.latents)
    except ValueError as error:
        raise invalid(path, str(error)) from error
    if not bool(torch.isfinite(latents).all()):
        raise invalid(path, "has NaN or infinite values; resume from an earlier, finite step")
    return latents


# -- pipeline arguments


def _parse_pipeline(pipeline: pb.PipelineSettings, facts: PipelineFacts, config: ServerConfig) -> dict[str, Any]:
    arguments = dict(facts.default_arguments)
    for name in ("height", "width"):
        if pipeline.HasField(name):
            arguments[name] = _checked_size(getattr(pipeline, name), f"pipeline.{name}", facts)
    pixels = arguments.get("height", 0) * arguments.get("width", 0)
    if pixels > config.max_pixels:
        blamed = "height" if pipeline.HasField("height") or not pipeline.HasField("width") else "width"
        raise over_limit(f"pipeline.{blamed}", pixels, "max_pixels", config.max_pixels)
    if pipeline.HasField("num_frames"):
        arguments["num_frames"] = _checked_frames(pipeline.num_frames, facts, config)
    if pipeline.HasField("guidance_scale"):
        if not facts.has_guidance_scale:
            raise invalid("pipeline.guidance_scale", f"{facts.pipeline_class} takes none; leave it out")
        if not (math.isfinite(pipeline.guidance_scale) and pipeline.guidance_scale >= 0):
            raise invalid("pipeline.guidance_scale", f"{pipeline.guidance_scale}; pass a finite value of at least 0")
        arguments["guidance_scale"] = pipeline.guidance_scale
    for name in sorted(pipeline.arguments):
        arguments[name] = _checked_argument(name, pipeline.arguments[name], facts, config)
    return arguments


def _checked_size(value: int, field: str, facts: PipelineFacts) -> int:
    if not facts.has_size:
        raise invalid(field, f"{facts.pipeline_class} takes none; leave it out")
    multiple = facts.size_multiple
    if value < multiple or value % multiple:
        near = max(multiple, round(value / multiple) * multiple)
        raise invalid(field, f"{value} is not a positive multiple of {multiple}; pass for example {near}")
    return value


def _checked_frames(value: int, facts: PipelineFacts, config: ServerConfig) -> int:
    if not facts.video:
        raise invalid("pipeline.num_frames", f"{facts.pipeline_class} makes images; leave it out")
    if value > config.max_frames:
        raise over_limit("pipeline.num_frames", value, "max_frames", config.max_frames)
    if value < 1 or (value - 1) % facts.frame_multiple:
        raise invalid(
            "pipeline.num_frames",
            f"{value} is not a multiple of {facts.frame_multiple} plus 1; pass for example "
            f"{max(0, value - 1) // facts.frame_multiple * facts.frame_multiple + 1}",
        )
    return value


def _checked_argument(name: str, value: pb.ArgumentValue, facts: PipelineFacts, config: ServerConfig) -> Any:
    field = f"pipeline.arguments[{name}]"
    if name not in facts.arguments:
        known = ", ".join(facts.arguments) or "none"
        raise invalid(field, f"{facts.pipeline_class} has no such argument to set; it has: {known}")
    kinds = facts.arguments[name]
    match value.WhichOneof("kind"):
        case "bool_value" if "bool" in kinds:
            return value.bool_value
        case "int_value" if "int" in kinds:
            if abs(value.int_value) > config.max_argument_value:
                raise over_limit(field, value.int_value, "max_argument_value", config.max_argument_value)
            return value.int_value
        case "int_value" if "float" in kinds:
            return float(value.int_value)
        case "double_value" if "float" in kinds:
            if not math.isfinite(value.double_value):
                raise invalid(field, f"{value.double_value}; pass a finite value")
            return value.double_value
        case "string_value" if "str" in kinds:
            _check_text(value.string_value, field, config)
            return value.string_value
    raise invalid(field, f"{facts.pipeline_class} takes {' or '.join(kinds)} here; pass that kind of value")


# -- output and policy


def _parse_latents(output: pb.OutputSettings, num_steps: int) -> LatentsSelection | tuple[int, ...]:
    if output.WhichOneof("latents") != "latents_indices":
        return _choose(output.latents_selection, "output.latents_selection", _SELECTIONS)
    indices = tuple(output.latents_indices.indices)
    try:
        validate_indices("latents_indices", indices, num_steps + 1)
    except RolloutArgsError as error:
        raise invalid("output.latents_indices", error.problem) from error
    return indices


def _check_policy(request: pb.GenerateRolloutRequest) -> None:
    policy = request.policy
    if policy.HasField("max_wait"):
        if policy.WhichOneof("kind") is None:
            raise invalid(
                "policy.max_wait", "given without a version to wait for; pass exactly or at_least, or leave it out"
            )
        if not (0 <= policy.max_wait.seconds <= 315_576_000_000 and 0 <= policy.max_wait.nanos <= 999_999_999):
            raise invalid("policy.max_wait", "is negative or no valid Duration; pass how long to wait at most")
