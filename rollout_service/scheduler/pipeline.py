"""Running an unmodified diffusers pipeline with two parts replaced: its scheduler and its denoiser.

Used by the engine (whose denoisers park the call and merge it with others) and by replay (whose denoisers call
the module directly), so that a rollout and its replay go through the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from .mixin import RolloutFlowMatchEulerDiscreteScheduler

#: Component names under which diffusers pipelines keep their denoisers.
DENOISER_COMPONENTS = ("transformer", "transformer_2")
#: The denoiser argument that carries the latents.
LATENTS_ARGUMENT = "hidden_states"

DenoiserRun = Callable[[str, nn.Module, dict[str, Any]], Any]


def call_directly(component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
    """The plain way to run a denoiser."""
    return module(**arguments)


class StartLatentsError(ValueError):
    """Latents to start from that the pipeline cannot start from."""


class DenoiserProxy:
    """Stands in a pipeline for one of its denoisers, and hands each call to ``run``.

    Latents are carried in a dtype that holds the wire dtype exactly; here, and only here, they are cast to the
    denoiser's own.
    """

    def __init__(self, component: str, module: nn.Module, run: DenoiserRun = call_directly) -> None:
        self._component, self._module, self._run = component, module, run
        self._parameter_names = list(inspect.signature(module.forward).parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the denoiser on the given arguments, made keyword arguments, latents in the denoiser's dtype."""
        arguments = dict(zip(self._parameter_names, args, strict=False)) | kwargs
        latents = arguments.get(LATENTS_ARGUMENT)
        if isinstance(latents, Tensor):
            arguments[LATENTS_ARGUMENT] = latents.to(self._module.dtype)  # type: ignore[arg-type]
        return self._run(self._component, self._module, arguments)

    def cache_context(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Step caches change what is sampled, so there is none to enter."""
        return nullcontext()


def denoisers(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The pipeline's denoisers by component name.

    Raises:
        ValueError: it has none under a known name.
    """
    found = {name: getattr(pipe, name, None) for name in DENOISER_COMPONENTS}
    present = {name: module for name, module in found.items() if module is not None}
    if not present:
        raise ValueError(f"{type(pipe).__name__} has no {' or '.join(DENOISER_COMPONENTS)}; only these are served")
    return present


def rollout_scheduler(pipe: DiffusionPipeline) -> RolloutFlowMatchEulerDiscreteScheduler:
    """A fresh rollout scheduler from the pipeline's own scheduler config.

    A flow pipeline whose scheduler has no Euler step (Wan's UniPC) gets a flow-Euler scheduler with the same
    shift.

    Raises:
        ValueError: the scheduler is not a flow-matching one.
    """
    scheduler = pipe.scheduler
    config = dict(scheduler.config)
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        if not config.get("use_flow_sigmas"):
            raise ValueError(
                f"{type(scheduler).__name__} is not a flow-matching scheduler; "
                "use a checkpoint with FlowMatchEulerDiscreteScheduler or use_flow_sigmas"
            )
        config = {
            "shift": config.get("flow_shift", 1.0),
            "num_train_timesteps": config.get("num_train_timesteps", 1000),
            "use_dynamic_shifting": config.get("use_dynamic_shifting", False),
            "time_shift_type": config.get("time_shift_type", "exponential"),
        }
    return RolloutFlowMatchEulerDiscreteScheduler.from_config(config)  # type: ignore[return-value]


def clone_pipeline(
    pipe: DiffusionPipeline,
    scheduler: RolloutFlowMatchEulerDiscreteScheduler,
    *,
    run: DenoiserRun = call_directly,
    latents_dtype: torch.dtype | None = None,
    start_latents: Tensor | None = None,
) -> DiffusionPipeline:
    """A shallow clone over the same components, ready for one call.

    Args:
        pipe: the pipeline; it is not changed.
        scheduler: takes the place of the pipeline's scheduler.
        run: what each denoiser call is handed to.
        latents_dtype: the wire dtype; the first latents are rounded to it. None leaves them as they are drawn.
        start_latents: x_k to start from instead of the x_0 that the pipeline draws (it still draws, so that its
            generators advance as in a rollout from the start), in the shape that ``scheduler.step`` receives.

    Raises:
        StartLatentsError: at the pipeline's call, where ``start_latents`` has another shape than the drawn x_0.
    """
    proxies = {name: DenoiserProxy(name, module, run) for name, module in denoisers(pipe).items()}
    parameters = inspect.signature(type(pipe).__init__).parameters
    components = pipe.components
    settings = {name: pipe.config[name] for name in parameters if name in pipe.config and name not in components}
    clone = type(pipe)(**{**components, **settings, **proxies, "scheduler": scheduler})
    clone.set_progress_bar_config(disable=True)
    module_dtype = next(iter(proxies.values())).dtype
    _wrap_prepare_latents(clone, module_dtype, latents_dtype, start_latents)
    return clone


def _wrap_prepare_latents(
    clone: DiffusionPipeline, module_dtype: torch.dtype, wire: torch.dtype | None, start: Tensor | None
) -> None:
    """Make ``prepare_latents`` return x_k, rounded to the wire dtype, carried in a dtype that holds it exactly.

    In diffusers the latents are what it returns, or the first of several things.
    """
    prepare = clone.prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        returned = prepare(*args, **kwargs)
        latents = returned[0] if isinstance(returned, tuple) else returned
        if start is not None:
            if start.shape != latents.shape:
                raise StartLatentsError(f"has shape {list(start.shape[1:])}; pass {list(latents.shape[1:])}")
            latents = start.to(latents.device)
        if wire is not None:
            latents = latents.to(wire).to(torch.promote_types(module_dtype, wire))
        return (latents, *returned[1:]) if isinstance(returned, tuple) else latents

    clone.prepare_latents = prepare_latents


def images_per_prompt_argument(pipeline_class: type[DiffusionPipeline]) -> str:
    """The name of the argument that repeats a prompt: ``num_images_per_prompt`` or ``num_videos_per_prompt``.

    Raises:
        ValueError: the pipeline has neither.
    """
    parameters = inspect.signature(pipeline_class.__call__).parameters
    for name in ("num_images_per_prompt", "num_videos_per_prompt"):
        if name in parameters:
            return name
    raise ValueError(f"{pipeline_class.__name__} cannot make several samples of one prompt")


def undecorated_call(pipe: DiffusionPipeline, arguments: Mapping[str, Any]) -> Any:
    """Call the pipeline without the ``no_grad`` that decorates ``__call__``; grad mode is the caller's."""
    return inspect.unwrap(type(pipe).__call__)(pipe, **arguments)
