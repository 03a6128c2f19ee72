"""Scores a pipeline with the checker, on fixed noises, so that two pipelines can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_service.models.embedded.checker import Verdict, check_batch
from rollout_service.models.embedded.world import IMAGE_SIZE

DEFAULTS_NAME = "rollout_defaults.json"


@dataclass(frozen=True)
class Score:
    """Means over images, each in [0, 1]: of the reward, of being correct in all attributes, and in each of them."""

    reward: float
    strict: float
    colour: float
    shape: float
    position: float

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Score:
        """The means over some verdicts."""
        return cls(
            reward=float(np.mean([verdict.reward for verdict in verdicts])),
            strict=float(np.mean([verdict.strict for verdict in verdicts])),
            colour=float(np.mean([verdict.colour_correct for verdict in verdicts])),
            shape=float(np.mean([verdict.shape_correct for verdict in verdicts])),
            position=float(np.mean([verdict.position_correct for verdict in verdicts])),
        )


def read_defaults(directory: Path) -> dict[str, Any]:
    """What a checkpoint's ``rollout_defaults.json`` says, as arguments of its pipeline's call."""
    defaults = json.loads((directory / DEFAULTS_NAME).read_text())
    arguments = defaults.pop("pipeline_arguments")
    return {"num_inference_steps": defaults.pop("num_steps"), **defaults, **arguments}


def generate(
    pipeline: Callable[..., Any],
    prompts: Sequence[str],
    *,
    noises_per_prompt: int = 1,
    seed: int = 0,
    **arguments: Any,
) -> NDArray[np.uint8]:
    """Images, uint8 [N, K, 16, 16, 3], of N prompts from the same K noises each."""
    generator = torch.Generator().manual_seed(seed)
    noises = torch.randn(noises_per_prompt, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    images = pipeline(
        prompt=[prompt for prompt in prompts for _ in range(noises_per_prompt)],
        latents=noises.repeat(len(prompts), 1, 1, 1),
        output_type="np",
        **arguments,
    ).images
    return (images * 255).round().astype(np.uint8).reshape(len(prompts), noises_per_prompt, *images.shape[1:])


def evaluate(
    pipeline: Callable[..., Any], prompts: Sequence[str], *, noises_per_prompt: int = 1, **arguments: Any
) -> dict[str, list[Verdict]]:
    """The verdicts for each prompt, over the same noises."""
    images = generate(pipeline, prompts, noises_per_prompt=noises_per_prompt, **arguments)
    return {prompt: check_batch(images[i], [prompt] * noises_per_prompt) for i, prompt in enumerate(prompts)}
