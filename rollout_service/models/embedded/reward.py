"""The shapes world as a trainer finds it by name: the checker as a reward, and the prompts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rollout_service.models.embedded.checker import check_batch
from rollout_service.models.embedded.world import HELD_OUT_PROMPTS, TRAIN_PROMPTS


def shapes_reward(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Share of colour, shape and position that is right, in [0, 1], of each image of uint8 [N, 16, 16, 3]."""
    return [verdict.reward for verdict in check_batch(images.cpu().numpy(), prompts)]


def shapes_prompts() -> dict[str, tuple[str, ...]]:
    """96 prompts to train on under ``train``, and 24 others under ``held_out``."""
    return {"train": TRAIN_PROMPTS, "held_out": HELD_OUT_PROMPTS}
