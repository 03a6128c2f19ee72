"""Scoring the stored transitions of a trajectory with a pipeline: how a trainer recomputes log-probs.

The same pipeline runs in the scheduler's replay state, through the same denoiser proxy: guidance, packing and casts
are the same code as in the rollout, so parity is structural.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusion_rollout.v1 import rollout_pb2 as pb
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from rollout_service.scheduler import RolloutArgs, StepRecord, clone_pipeline, rollout_scheduler
from rollout_service.scheduler.pipeline import call_directly, images_per_prompt_argument, undecorated_call
from rollout_service.tensors import TORCH_DTYPES

from .errors import RolloutError
from .trajectory import Trajectory

_DYNAMICS = {pb.DYNAMICS_ODE: "ode", pb.DYNAMICS_SDE: "sde", pb.DYNAMICS_DANCE: "dance", pb.DYNAMICS_CPS: "cps"}
_KINDS = {pb.LOG_PROB_KIND_GAUSSIAN: "gaussian", pb.LOG_PROB_KIND_SQUARED_ERROR: "squared_error"}


@dataclass(frozen=True)
class ReplayedStep:
    """One step of the samples of one prompt, scored."""

    sample_indices: tuple[int, ...]
    """K samples, as in the trajectory."""
    step_index: int
    log_prob: Tensor | None
    """fp32 [K], with gradients if enabled; None for a deterministic step."""
    mean: Tensor
    """fp32 [K, ...], with gradients if enabled."""
    noise_std: float
    sample: Tensor
    """x_k, [K, ...]."""
    next_sample: Tensor
    """The stored x_{k+1} that was scored, [K, ...]."""


def replay(
    pipe: DiffusionPipeline,
    trajectory: Trajectory,
    *,
    steps: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    grad: bool = True,
) -> Iterator[ReplayedStep]:
    """Score stored steps, prompt by prompt and step by step.

    Each yielded step carries its own graph: run ``backward`` on it before taking the next one, and memory stays flat.
    The samples of a prompt (that start at the same step, and did not fail) are one batch, as in the rollout; with the
    same weights, dtype and batch shape the result is the rollout's, bit for bit. Only the denoiser gets gradients.

    Args:
        pipe: the pipeline with the policy to score; it is not changed.
        trajectory: with x_k and x_{k+1} of each step to score.
        steps: absolute indices; None is every stochastic step (every step for ``ode``) that has its latents.
        prompts: prompt indices; None is all.
        grad: whether to build graphs.

    Raises:
        RolloutError: latents that are needed were not returned, or the pipeline does not fit them.
    """
    args = rollout_args(trajectory)
    for prompt, samples, start in _groups(trajectory):
        if prompts is not None and prompt not in prompts:
            continue
        wanted = _steps(trajectory, start) if steps is None else tuple(k for k in sorted(steps) if k >= start)
        if not wanted:
            continue
        missing = sorted({i for k in wanted for i in (k, k + 1)} - set(trajectory.latents_indices))
        if missing:
            raise RolloutError(f"x_k was not returned for k in {missing}; ask for latents='all' or 'stochastic'")
        yield from _replay_group(pipe, trajectory, args, prompt, samples, wanted, grad)


def rollout_args(trajectory: Trajectory) -> RolloutArgs:
    """The scheduler settings of a trajectory, its schedule pinned."""
    sampling, accepted = trajectory.request.sampling, trajectory.accepted
    has_indices = sampling.HasField("stochastic_step_indices")
    return RolloutArgs(
        dynamics=_DYNAMICS[sampling.dynamics],
        noise_level=sampling.noise_level if sampling.HasField("noise_level") else None,
        log_prob_kind=_KINDS.get(accepted.log_prob_kind),
        stochastic_step_indices=tuple(sampling.stochastic_step_indices.indices) if has_indices else None,
        sigmas=tuple(trajectory.sigmas.tolist()),
        latents_dtype=TORCH_DTYPES[accepted.latents_dtype],
    )


def pipeline_arguments(settings: pb.PipelineSettings) -> dict[str, Any]:
    """The resolved arguments of a pipeline's call."""
    names = ("height", "width", "num_frames", "guidance_scale")
    arguments: dict[str, Any] = {name: getattr(settings, name) for name in names if settings.HasField(name)}
    for name, value in settings.arguments.items():
        arguments[name] = getattr(value, value.WhichOneof("kind"))
    return arguments


def _groups(trajectory: Trajectory) -> list[tuple[int, tuple[int, ...], int]]:
    """(prompt, samples, start step), grouped as the server grouped them, failed samples left out."""
    groups: dict[tuple[int, int, bool], list[int]] = {}
    position = 0
    for prompt_index, prompt in enumerate(trajectory.request.prompts):
        count = len(prompt.samples) or prompt.seed_range.count
        for offset in range(count):
            given = bool(prompt.samples) and prompt.samples[offset].HasField("start_state")
            start = trajectory.accepted.samples[position].start_step
            if position not in trajectory.errors:
                groups.setdefault((prompt_index, start, given), []).append(position)
            position += 1
    return [(prompt, tuple(samples), start) for (prompt, start, _), samples in groups.items()]


def _steps(trajectory: Trajectory, start: int) -> tuple[int, ...]:
    have = set(trajectory.latents_indices)
    candidates = trajectory.stochastic_steps or range(trajectory.num_steps)
    return tuple(k for k in candidates if k >= start and {k, k + 1} <= have)


def _replay_group(
    pipe: DiffusionPipeline,
    trajectory: Trajectory,
    args: RolloutArgs,
    prompt: int,
    samples: tuple[int, ...],
    steps: tuple[int, ...],
    grad: bool,
) -> Iterator[ReplayedStep]:
    rows = list(samples)
    latents = {k: trajectory.latents_at(k)[rows] for k in {i for step in steps for i in (step, step + 1)}}
    scheduler = rollout_scheduler(pipe)
    scheduler.prepare_replay(args, latents, steps=steps, sink=_hand_over)
    clone = clone_pipeline(
        pipe,
        scheduler,
        run=_run_with_gradients if grad else call_directly,
        latents_dtype=args.latents_dtype,
        start_latents=latents[steps[0]],
    )
    arguments = pipeline_arguments(trajectory.accepted.pipeline)
    request = trajectory.request.prompts[prompt]
    if request.HasField("negative_prompt"):
        arguments["negative_prompt"] = request.negative_prompt
    arguments |= {
        "prompt": request.prompt,
        "num_inference_steps": trajectory.num_steps,
        "output_type": "latent",
        "return_dict": False,
        "generator": [torch.Generator("cpu").manual_seed(0) for _ in samples],  # draws an x_0 that is not used
        images_per_prompt_argument(type(pipe)): len(samples),
    }
    # The pipeline is a coroutine, as in the engine: it runs to its next step each time one is asked for. Grad mode
    # belongs to the thread, so it is set around each resumption; off until the denoiser, which turns it on for itself
    # and for the guidance that follows.
    pipeline = greenlet(lambda: undecorated_call(clone, arguments))
    while True:
        pipeline.parent = getcurrent()
        with torch.no_grad():
            record = pipeline.switch()
        if not isinstance(record, StepRecord):
            return
        assert record.mean is not None  # a replay always keeps it
        yield ReplayedStep(
            samples,
            record.step_index,
            record.log_prob,
            record.mean,
            record.noise_std,
            record.sample,
            record.next_sample,
        )


def _hand_over(record: StepRecord) -> None:
    """Switch from the pipeline to whoever iterates."""
    parent = getcurrent().parent
    assert parent is not None
    parent.switch(record)


def _run_with_gradients(component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
    torch.set_grad_enabled(True)
    return module(**arguments)
