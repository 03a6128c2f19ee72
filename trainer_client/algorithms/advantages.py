"""Advantages: how much better a sample is than the others of its group."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageStd = Literal["group", "global"]


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[Hashable],
    *,
    std: AdvantageStd = "group",
    epsilon: float = 0.01,
    clip: float | None = 5.0,
) -> Tensor:
    """(reward - mean of its group) / (std + epsilon), clamped to [-clip, clip].

    The group-relative advantage of GRPO as Flow-GRPO (arXiv 2505.05470, and its per-prompt statistics in code) and
    DanceGRPO (arXiv 2505.07818) use it, both with a clip at 5. Call it once with the rewards of all processes, or the
    statistics are those of a part. A group of equal rewards, or of a single sample, gets exactly 0. Computed in
    float64 on the CPU.

    Args:
        rewards: [N], any real dtype, finite; a tensor on any device, or numbers.
        group_ids: [N], what the samples of one group share, such as the prompt; a tensor, compared by value, or
            hashable objects that are not tensors.
        std: ``group`` divides by the population std of the group, ``global`` by that of all N rewards, which keeps
            groups of nearly equal rewards from being blown up.
        epsilon: added to the std, > 0, in units of the reward. The references use 1e-4 to 1e-8, which turns noise in
            nearly equal rewards into advantages of full size; pass theirs to reproduce them.
        clip: bound of the magnitude, > 0; None for no bound.

    Returns:
        float32 [N], on the device of ``rewards``, without gradients.

    Raises:
        ValueError: no rewards, a non-finite one, not [N], lengths that differ, an unknown std, or an epsilon or clip
            that is not positive.
        TypeError: a group id that cannot be hashed, or is a tensor.
    """
    # Numbers straight to float64: torch's default dtype would round them first.
    values = rewards.detach() if isinstance(rewards, Tensor) else torch.as_tensor(rewards, dtype=torch.float64)
    device, values = values.device, values.to("cpu", torch.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"rewards: shape {list(values.shape)}; pass [N] with one reward per sample, at least one")
    if isinstance(group_ids, Tensor) and group_ids.ndim != 1:
        raise ValueError(f"group_ids: shape {list(group_ids.shape)}; pass [N] with one id per sample")
    ids: Sequence[Hashable] = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    if len(ids) != len(values):
        raise ValueError(f"group_ids: {len(ids)} given for {len(values)} rewards; pass one each")
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).nonzero()[0])
        raise ValueError(f"rewards: {values[bad].item()} at position {bad} is not finite; leave that sample out")
    if std not in get_args(AdvantageStd):
        raise ValueError(f"std: {std!r} is unknown; pass 'group' or 'global'")
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon: {epsilon} cannot be added to the std; pass more than 0, for example 0.01")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: {clip} is no bound; pass more than 0, or None for no bound")

    first: dict[Hashable, int] = {}
    for position, group in enumerate(ids):
        # Tensors hash by identity: each would be a group of its own, with advantage 0.
        if isinstance(group, Tensor) or not _hashable(group):
            kind = type(group).__name__
            raise TypeError(f"group_ids: a {kind} at position {position}; pass one tensor, or hashable ids")
        first.setdefault(group, position)
    number = {group: n for n, group in enumerate(first)}
    index = torch.tensor([number[group] for group in ids])
    counts = torch.bincount(index)

    def group_mean(x: Tensor) -> Tensor:
        return (x.new_zeros(len(first)).index_add_(0, index, x) / counts)[index]

    # Relative to the first of the group, so that equal rewards cancel exactly.
    relative = values - values[list(first.values())][index]
    centred = relative - group_mean(relative)
    scale = group_mean(centred.square()).sqrt() if std == "group" else values.std(correction=0)
    advantages = centred / (scale + epsilon)
    return (advantages if clip is None else advantages.clamp(-clip, clip)).to(device, torch.float32)


def _hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
