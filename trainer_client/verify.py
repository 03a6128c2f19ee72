"""The mismatch doctor: does a pipeline in this process agree with the rollout that a server streamed?"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from .replay import replay
from .trajectory import Trajectory


@dataclass(frozen=True)
class StepMismatch:
    """The largest differences of one step, over the samples."""

    step_index: int
    noise_std: float
    log_prob: float | None
    """max |replayed - streamed| log-prob; None for a deterministic step."""
    ratio: float | None
    """max |exp(replayed - streamed) - 1|; None for a deterministic step."""
    mean: float | None
    """max |replayed - streamed| mean; None if the trajectory has no means."""
    latents: float | None
    """max |replayed mean, rounded as sent - streamed x_{k+1}|, of a deterministic step."""


@dataclass(frozen=True)
class MismatchReport:
    """What :func:`compare` found."""

    steps: tuple[StepMismatch, ...]
    num_samples: int

    def worst(self, name: str) -> float:
        """The largest value of a field over all steps (0.0 where no step has it)."""
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return max(values, key=_nan_last, default=0.0)


def load_policy(path: str | Path, dtype: torch.dtype, device: str = "cpu") -> DiffusionPipeline:
    """Load a pipeline to replay with, without the libraries' progress bars and notices.

    Raises:
        OSError, ValueError: it cannot be loaded.
    """
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        pipe = DiffusionPipeline.from_pretrained(path, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def compare(pipe: DiffusionPipeline, trajectory: Trajectory) -> MismatchReport:
    """Replay every step of a trajectory that has its latents, and compare with what was streamed.

    Raises:
        RolloutError: the trajectory lacks latents (ask for ``latents="all"``).
    """
    have = set(trajectory.latents_indices)
    steps = [k for k in range(trajectory.num_steps) if {k, k + 1} <= have]
    found: dict[int, list[StepMismatch]] = {}
    for replayed in replay(pipe, trajectory, steps=steps, grad=False):
        rows, k = list(replayed.sample_indices), replayed.step_index
        log_prob = ratio = mean = latents = None
        if replayed.log_prob is not None:
            streamed = trajectory.log_probs[rows, trajectory.stochastic_steps.index(k)].double()
            difference = replayed.log_prob.double().cpu() - streamed
            log_prob = float(difference.abs().max())
            ratio = float(torch.expm1(difference).abs().max())
        else:
            rounded = replayed.mean.to(replayed.next_sample.dtype).double()
            latents = float((rounded - replayed.next_sample.double()).abs().max())
        if trajectory.mean is not None:
            mean = float((replayed.mean.cpu() - trajectory.mean[rows, k]).abs().max())
        found.setdefault(k, []).append(StepMismatch(k, replayed.noise_std, log_prob, ratio, mean, latents))
    return MismatchReport(tuple(_worst(found[k]) for k in sorted(found)), int(trajectory.ok.sum()))


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _worst(same_step: list[StepMismatch]) -> StepMismatch:
    def largest(name: str) -> float | None:
        values = [value for step in same_step if (value := getattr(step, name)) is not None]
        return max(values, key=_nan_last) if values else None

    first = same_step[0]
    return StepMismatch(
        first.step_index, first.noise_std, largest("log_prob"), largest("ratio"), largest("mean"), largest("latents")
    )
