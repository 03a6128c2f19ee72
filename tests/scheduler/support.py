"""Running rollouts and replays of the tiny pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from rollout_service.scheduler import (
    RolloutArgs,
    RolloutFlowMatchEulerDiscreteScheduler,
    StepRecord,
    as_float32,
    clone_pipeline,
    initial_generator_seed,
    rollout_scheduler,
)
from rollout_service.scheduler.pipeline import DenoiserRun, call_directly, undecorated_call
from tests.support.tiny_pipelines import FAMILIES

SEEDS = (3, 2**64 - 1)
STEPS = 4
SIGMAS = as_float32((1.0, 0.8, 0.5, 0.2, 0.0))
SETTINGS = {
    "ode": RolloutArgs("ode"),
    "sde": RolloutArgs("sde", 0.7),
    "dance": RolloutArgs("dance", 0.5),
    "cps": RolloutArgs("cps", 0.8),
}


@dataclass(frozen=True)
class Run:
    """What a rollout or a replay made."""

    output: Tensor
    """What the pipeline returned: x_T, which some pipelines unpack."""
    records: list[StepRecord]
    scheduler: RolloutFlowMatchEulerDiscreteScheduler

    @property
    def latents(self) -> dict[int, Tensor]:
        """x_k by absolute k."""
        starts = {record.step_index: record.sample for record in self.records}
        return starts | {record.step_index + 1: record.next_sample for record in self.records}

    @property
    def log_probs(self) -> dict[int, Tensor]:
        """Log-probs by step."""
        return {record.step_index: record.log_prob for record in self.records if record.log_prob is not None}


def call_arguments(name: str, steps: int = STEPS) -> dict[str, Any]:
    """Arguments of a family's pipeline for one sample per seed, but the generators."""
    family = FAMILIES[name]
    return {
        "prompt": "a red fox jumps over the fence",
        "negative_prompt": " ",
        "num_inference_steps": steps,
        "output_type": "latent",
        "return_dict": False,
        "num_videos_per_prompt" if name == "wan" else "num_images_per_prompt": len(SEEDS),
        **family.call_arguments,
    }


def x_0_generators() -> list[torch.Generator]:
    """The generators that draw x_0 in a keyed rollout of SEEDS."""
    return [torch.Generator("cpu").manual_seed(initial_generator_seed(seed)) for seed in SEEDS]


def plain(pipe: DiffusionPipeline, name: str, steps: int = STEPS, **changes: Any) -> Tensor:
    """x_T of the pipeline as it is."""
    return pipe(**{**call_arguments(name, steps), "generator": x_0_generators(), **changes})[0]


@contextmanager
def scheduler_set(pipe: DiffusionPipeline, scheduler: FlowMatchEulerDiscreteScheduler) -> Iterator[DiffusionPipeline]:
    """The pipeline with another scheduler."""
    own, pipe.scheduler = pipe.scheduler, scheduler
    try:
        yield pipe
    finally:
        pipe.scheduler = own


def rollout(
    pipe: DiffusionPipeline,
    name: str,
    args: RolloutArgs,
    *,
    run: DenoiserRun = call_directly,
    start: tuple[int, Tensor] | None = None,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
) -> Run:
    """A rollout over a clone of the pipeline, from x_0 or from ``start`` = (k, x_k)."""
    start_step, start_latents = start or (0, None)
    scheduler = rollout_scheduler(pipe)
    noise = scheduler.prepare_rollout(args, seeds, start_step=start_step)
    clone = clone_pipeline(pipe, scheduler, run=run, latents_dtype=args.latents_dtype, start_latents=start_latents)
    (output, *_) = clone(**call_arguments(name, steps), generator=noise.initial_generators())
    return Run(output, scheduler.rollout_records, scheduler)


def rollout_set(pipe: DiffusionPipeline, name: str, args: RolloutArgs, **changes: Any) -> Run:
    """A rollout as in a plain diffusers script, by setting the pipeline's scheduler."""
    scheduler = RolloutFlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    noise = scheduler.prepare_rollout(args, SEEDS)
    with scheduler_set(pipe, scheduler):
        (output, *_) = pipe(**{**call_arguments(name), "generator": noise.initial_generators(), **changes})
    return Run(output, scheduler.rollout_records, scheduler)


def replay(
    pipe: DiffusionPipeline,
    name: str,
    args: RolloutArgs,
    latents: Mapping[int, Tensor],
    steps: Sequence[int],
    *,
    run: DenoiserRun = call_directly,
) -> Run:
    """A replay over a clone of the pipeline; grad mode is the caller's."""
    scheduler = rollout_scheduler(pipe)
    scheduler.prepare_replay(args, latents, steps=steps)
    clone = clone_pipeline(pipe, scheduler, run=run, latents_dtype=args.latents_dtype, start_latents=latents[steps[0]])
    arguments = {**call_arguments(name), "generator": x_0_generators()}
    (output, *_) = undecorated_call(clone, arguments)
    return Run(output, scheduler.rollout_records, scheduler)


def pinned(args: RolloutArgs, made: Run) -> RolloutArgs:
    """The settings with the schedule that a rollout ran."""
    return dataclasses.replace(args, sigmas=made.scheduler.rollout_sigmas)


def assert_same_records(actual: Sequence[StepRecord], expected: Sequence[StepRecord]) -> None:
    """Every field of every record is equal, tensors bit for bit."""
    assert [record.step_index for record in actual] == [record.step_index for record in expected]
    for one, other in zip(actual, expected, strict=True):
        for field in dataclasses.fields(one):
            value, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(wanted, Tensor):
                assert value.dtype == wanted.dtype, field.name
                assert torch.equal(value, wanted), (one.step_index, field.name)
            else:
                assert value == wanted, field.name
