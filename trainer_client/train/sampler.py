"""The rollouts of a run: what is asked of the server, as a function of (settings, iteration, policy version)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from torch import Tensor

from ..algorithms import derive_seed, fixed_window, random_steps, random_window, sliding_window
from ..client import RolloutClient
from ..errors import QueueFullError, RolloutError, UnavailableError
from ..request import Prompt, Sample
from ..trajectory import Trajectory
from .config import TrainConfig, TrainConfigError

_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class Group:
    """The samples of one prompt that did not fail."""

    trajectory: Trajectory
    prompt_index: int
    """In its trajectory."""
    samples: tuple[int, ...]
    """K indices in its trajectory."""

    @property
    def prompt(self) -> str:
        """Its text."""
        return self.trajectory.request.prompts[self.prompt_index].prompt

    def images(self) -> list[Tensor]:
        """Of each sample, uint8 [(frames,) height, width, 3]."""
        media = [self.trajectory.media[sample] for sample in self.samples]
        return [image for image in media if isinstance(image, Tensor)]


@dataclass(frozen=True)
class Rollout:
    """Samples of one iteration, by prompt."""

    version: int
    """Policy version that made them."""
    groups: tuple[Group, ...]
    stochastic_steps: tuple[int, ...]
    failed_samples: int
    seconds: float

    @property
    def num_samples(self) -> int:
        """Samples that did not fail."""
        return sum(len(group.samples) for group in self.groups)


class Sampler:
    """Asks a server for rollouts.

    Args:
        client: connected to it.
        config: of the run.
        facts: what it says of itself.

    Raises:
        TrainConfigError: a window that its steps cannot hold.
    """

    def __init__(self, client: RolloutClient, config: TrainConfig, facts: pb.GetServerInfoResponse) -> None:
        self._client, self._config, self._limits = client, config, facts.limits
        num_steps = config.num_steps or facts.defaults.num_steps
        if config.steps_needed() > num_steps:
            field = "window_size" if config.window == "fixed_window" else "window_candidates"
            raise TrainConfigError(
                field, f"the window needs {config.steps_needed()} steps and rollouts have {num_steps}; pass less"
            )
        has_guidance = facts.defaults.pipeline.HasField("guidance_scale")
        self._settings: dict[str, Any] = {
            "num_steps": num_steps,
            "guidance_scale": config.guidance_scale if has_guidance else None,
            "height": config.height,
            "width": config.width,
            "num_frames": config.num_frames,
            "arguments": config.arguments,
            "latents_dtype": getattr(torch, config.latents_dtype),
            "media": "raw",
            "policy_max_wait": timedelta(seconds=config.policy_max_wait_seconds),
        }

    def rollout(self, iteration: int, prompts: Sequence[str], version: int) -> Rollout:
        """The rollout of an iteration: its prompts, seeds and stochastic steps follow from the run's seed.

        Raises:
            RolloutError: the typed error of the server; or every sample failed.
        """
        config = self._config
        chosen = draw(len(prompts), config.prompts_per_iteration, derive_seed(config.seed, "prompts", iteration))
        seed, count = derive_seed(config.seed, "samples", iteration), config.samples_per_prompt
        requested = [
            Prompt(prompts[index], _samples(range(seed + n * count, seed + (n + 1) * count)), config.negative_prompt)
            for n, index in enumerate(chosen)
        ]
        steps = window(config, iteration)
        return self._generate(
            requested,
            version,
            steps,
            dynamics=config.dynamics,
            noise_level=config.noise_level,
            stochastic_step_indices=steps,
            latents="stochastic",
        )

    def evaluation(self, prompts: Sequence[str], version: int) -> Rollout:
        """ODE samples of each prompt from the seeds 0, 1, ..., the same in every run.

        Raises:
            RolloutError: as :meth:`rollout`.
        """
        samples = _samples(range(self._config.evaluation_samples))
        requested = [Prompt(prompt, samples, self._config.negative_prompt) for prompt in prompts]
        return self._generate(requested, version, (), dynamics="ode", latents="none")

    def _generate(self, prompts: Sequence[Prompt], version: int, steps: tuple[int, ...], **settings: Any) -> Rollout:
        began = time.monotonic()
        trajectories = [
            self._collect(part, **self._settings, **settings, policy_exactly=version) for part in self._parts(prompts)
        ]
        groups = tuple(group for trajectory in trajectories for group in _groups(trajectory))
        errors = [error for trajectory in trajectories for error in trajectory.errors.values()]
        if not groups:
            raise RolloutError(f"every sample failed: {errors[0].message}")
        return Rollout(version, groups, steps, len(errors), time.monotonic() - began)

    def _parts(self, prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
        """One rollout of all prompts if the server's limits allow, else as few as they do."""
        limits = self._limits
        samples = min(limits.max_samples, limits.max_running_samples + limits.max_queued_samples)
        size = max(1, min(limits.max_prompts, samples // len(prompts[0].samples)))
        for start in range(0, len(prompts), size):
            yield prompts[start : start + size]

    def _collect(self, prompts: Sequence[Prompt], **settings: Any) -> Trajectory:
        for attempt in range(1, self._config.attempts + 1):
            try:
                return self._client.generate(prompts, timeout=self._config.timeout_seconds, **settings).collect()
            except (QueueFullError, UnavailableError) as error:
                if attempt == self._config.attempts:
                    raise
                asked = error.retry_after_seconds if isinstance(error, QueueFullError) else 0.0
                time.sleep(min(max(asked, 2.0 ** (attempt - 1)), _LONGEST_PAUSE_SECONDS))
        raise AssertionError("attempts is positive")


def window(config: TrainConfig, iteration: int) -> tuple[int, ...]:
    """The stochastic steps of an iteration."""
    candidates, size = config.window_candidates, config.window_size
    match config.window:
        case "random_steps":
            return random_steps(candidates, size, derive_seed(config.seed, "window", iteration))
        case "random_window":
            return random_window(candidates, size, derive_seed(config.seed, "window", iteration))
        case "sliding_window":
            return sliding_window(iteration, candidates, size, iterations_per_move=config.window_iterations)
    return fixed_window(config.window_start, size, config.steps_needed())


def draw(count: int, size: int | None, seed: int) -> list[int]:
    """``size`` different indices of ``count`` in random order; all in their order if there are no more than that."""
    if size is None or size >= count:
        return list(range(count))
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()


def _samples(seeds: range) -> tuple[Sample, ...]:
    return tuple(Sample(seed) for seed in seeds)


def _groups(trajectory: Trajectory) -> Iterator[Group]:
    by_prompt: dict[int, list[int]] = {}
    for sample, prompt in enumerate(trajectory.prompt_indices):
        if sample not in trajectory.errors:
            by_prompt.setdefault(prompt, []).append(sample)
    for prompt, samples in by_prompt.items():
        yield Group(trajectory, prompt, tuple(samples))
