"""Loading a pipeline, and the facts about it that requests are checked against."""

from __future__ import annotations

import inspect
import json
import math
import types
import typing
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from rollout_service.models.embedded import CHECKPOINT_PATH
from rollout_service.scheduler import rollout_scheduler
from rollout_service.scheduler.pipeline import denoisers, images_per_prompt_argument

DEFAULTS_FILE = "rollout_defaults.json"
EMBEDDED = "embedded"

#: Arguments of a pipeline's call that the service sets itself; a request cannot.
OWNED_ARGUMENTS = frozenset(
    {
        "prompt",
        "negative_prompt",
        "height",
        "width",
        "num_frames",
        "guidance_scale",
        "num_inference_steps",
        "sigmas",
        "timesteps",
        "num_images_per_prompt",
        "num_videos_per_prompt",
        "generator",
        "latents",
        "output_type",
        "return_dict",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
    }
)


#: Arguments that count steps within the pipeline's loop, which starts later for a resumed sample: not to be set.
STEP_RELATIVE_ARGUMENTS = frozenset(
    {"cfg_trunc_ratio", "skip_layer_guidance_scale", "skip_layer_guidance_start", "skip_layer_guidance_stop"}
)


class ModelError(Exception):
    """The model cannot be served; the message is one line that says why and what would work."""


@dataclass(frozen=True)
class PipelineFacts:
    """What the frontend needs to know of a pipeline to check a request. JSON-ready."""

    model: str
    pipeline_class: str
    model_dtype: str
    """Name of a torch dtype."""
    device: str
    size_multiple: int
    """Heights and widths must be multiples of it."""
    frame_multiple: int
    """(num_frames - 1) must be a multiple of it; 0 if the pipeline makes images."""
    arguments: dict[str, list[str]]
    """Pipeline arguments that a request may set, with the kinds of value that each takes (bool, int, float, str)."""
    has_negative_prompt: bool
    has_guidance_scale: bool
    has_size: bool
    default_steps: int
    default_arguments: dict[str, Any]
    """Call arguments in force unless a request overrides them: height, width, guidance_scale, ..."""
    denoisers: list[dict[str, Any]] = field(default_factory=list)
    """Per component: component, class_name, num_parameters, merged, unmerged_reason."""
    num_weights: int = 0
    """Tensors that full weights of the denoisers have."""

    @property
    def video(self) -> bool:
        """Whether the pipeline makes video."""
        return self.frame_multiple > 0


def checkpoint_path(model: str) -> Path:
    """The directory of a local or the embedded checkpoint; a path that does not exist for a hub id."""
    return CHECKPOINT_PATH if model == EMBEDDED else Path(model)


def load_pipeline(model: str, *, revision: str | None, dtype: torch.dtype, device: str) -> DiffusionPipeline:
    """Load a checkpoint directory, a hub id, or `embedded`.

    Raises:
        ModelError: it cannot be loaded, or is not a flow-matching pipeline with a known denoiser.
    """
    path = checkpoint_path(model)
    if path.exists() and not (path / "model_index.json").is_file():
        raise ModelError(f"{model}: not a diffusers checkpoint (no model_index.json); pass a directory that has one")
    try:
        with warnings.catch_warnings():
            # The newer name of the argument is not known to every diffusers that we support.
            warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
            source = str(path) if path.exists() else model
            pipe = DiffusionPipeline.from_pretrained(source, revision=revision, torch_dtype=dtype)
    except Exception as error:  # diffusers and its hub client raise many kinds
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{model}: could not be loaded: {detail[0]}") from error
    try:
        denoisers(pipe)
        images_per_prompt_argument(type(pipe))
        rollout_scheduler(pipe)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{model}: {type(pipe).__name__} cannot be served: {error}") from error
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
    return pipe.to(device)


def read_defaults(model: str) -> dict[str, Any]:
    """The checkpoint's own defaults: ``rollout_defaults.json`` beside ``model_index.json`` (empty without one).

    Raises:
        ModelError: the file is not what it should be.
    """
    path = checkpoint_path(model) / DEFAULTS_FILE
    if not path.is_file():
        return {}
    try:
        defaults = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path.name}: not JSON: {error}") from error
    known = {"num_steps", "height", "width", "num_frames", "guidance_scale", "pipeline_arguments"}
    if not isinstance(defaults, dict) or not known.issuperset(defaults):
        raise ModelError(f"{path.name}: pass an object with any of {', '.join(sorted(known))}")
    return defaults


def pipeline_facts(pipe: DiffusionPipeline, model: str) -> PipelineFacts:
    """Read the facts off a pipeline and its defaults file.

    Raises:
        ModelError: the defaults do not fit the pipeline.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    defaults = read_defaults(model)
    arguments = _settable_arguments(type(pipe))
    extra = defaults.get("pipeline_arguments", {})
    if unknown := sorted(set(extra) - set(arguments)):
        raise ModelError(f"{DEFAULTS_FILE}: {type(pipe).__name__} takes no argument {', '.join(unknown)}")
    types_of = {name: arguments[name] for name in extra}
    types_of |= {name: ["int"] for name in ("num_steps", "height", "width", "num_frames")}
    types_of["guidance_scale"] = ["float", "int"]
    for name, value in (defaults | extra).items():
        if name in types_of and type(value).__name__ not in types_of[name]:
            raise ModelError(
                f"{DEFAULTS_FILE}: {name} is {value!r}; pass a value of type {' or '.join(types_of[name])}"
            )
    default_arguments = dict(extra)
    for name in ("height", "width", "num_frames", "guidance_scale"):
        value = defaults.get(name, _signature_default(parameters, name))
        if value is None and name in ("height", "width") and name in parameters:
            value = _native_size(pipe)
        if value is not None and name in parameters:
            default_arguments[name] = value
    first = next(iter(denoisers(pipe).values()))
    return PipelineFacts(
        model=Path(model).name if Path(model).exists() else model,
        pipeline_class=type(pipe).__name__,
        model_dtype=str(first.dtype).removeprefix("torch."),
        device=str(pipe.device),
        size_multiple=_size_multiple(pipe),
        frame_multiple=getattr(pipe, "vae_scale_factor_temporal", 1) if "num_frames" in parameters else 0,
        arguments=arguments,
        has_negative_prompt="negative_prompt" in parameters,
        has_guidance_scale="guidance_scale" in parameters,
        has_size="height" in parameters and "width" in parameters,
        default_steps=defaults.get("num_steps", _signature_default(parameters, "num_inference_steps") or 28),
        default_arguments=default_arguments,
    )


def _signature_default(parameters: Any, name: str) -> Any:
    parameter = parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def _settable_arguments(pipeline_class: type[DiffusionPipeline]) -> dict[str, list[str]]:
    """Arguments of plain types that the service does not own, with the kinds of value that each takes."""
    hints = typing.get_type_hints(pipeline_class.__call__)
    settable = {}
    for name in inspect.signature(pipeline_class.__call__).parameters:
        if name == "self" or name in OWNED_ARGUMENTS | STEP_RELATIVE_ARGUMENTS or name not in hints:
            continue
        union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        accepted = typing.get_args(hints[name]) if union else (hints[name],)
        kinds = [kind.__name__ for kind in (bool, int, float, str) if kind in accepted]
        # A str among other types is an image's path or a prompt's second form; only plain ones are settings.
        if kinds and set(accepted) <= {bool, int, float, str, type(None), list, list[str]}:
            settable[name] = kinds
    return settable


def _spatial_factor(pipe: DiffusionPipeline) -> int:
    return int(getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_scale_factor", 8))


def _native_size(pipe: DiffusionPipeline) -> int | None:
    native = getattr(pipe, "default_sample_size", None)
    return int(native) * _spatial_factor(pipe) if isinstance(native, int) else None


#: Pipelines that pack 2 x 2 latents into one token before the denoiser sees them.
_PACKING = {"FluxPipeline": 2, "QwenImagePipeline": 2}


def _size_multiple(pipe: DiffusionPipeline) -> int:
    """Pixels per token side: what the VAE, the pipeline's packing and the denoiser's patches divide by."""
    config: Any = next(iter(denoisers(pipe).values())).config
    patch = config.get("patch_size", 1)
    patch = patch[-1] if isinstance(patch, (list, tuple)) else patch
    packing = _PACKING.get(type(pipe).__name__)
    multiple = _spatial_factor(pipe) * (packing or patch or 1)
    # WanPipeline checks for 16 whatever its parts are.
    return math.lcm(multiple, 16) if type(pipe).__name__ == "WanPipeline" else multiple
