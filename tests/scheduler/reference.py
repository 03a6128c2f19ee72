"""The transitions and log-probs once more, in float64 and term by term as the design's table states them.

Written from the table, with x0 and x1, and sharing no code with what is tested.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIGMA_ONE = 1e-4
"""``sde`` replaces a sigma this near to 1 by sigma_max."""


def mean_and_std(
    dynamics: str, sample: Tensor, velocity: Tensor, s: float, s_next: float, s_max: float, n: float
) -> tuple[Tensor, float]:
    """Mean, float64, and noise std of a step from ``s`` to ``s_next``."""
    x, v = sample.double(), velocity.double()
    d = s - s_next
    x0, x1 = x - s * v, x + (1 - s) * v
    if dynamics == "ode":
        return x - d * v, 0.0
    if dynamics == "sde":
        a = n * math.sqrt(s / (1 - (s_max if abs(1 - s) <= SIGMA_ONE else s)))
        return x * (1 - a**2 * d / (2 * s)) - v * (1 + a**2 * (1 - s) / (2 * s)) * d, a * math.sqrt(d)
    if dynamics == "dance":
        return x - d * (v + n**2 * (x - (1 - s) * x0) / (2 * s**2)), n * math.sqrt(d)
    assert dynamics == "cps"
    std = s_next * math.sin(n * math.pi / 2)
    return (1 - s_next) * x0 + math.sqrt(max(0.0, s_next**2 - std**2)) * x1, std


def log_prob(next_sample: Tensor, mean: Tensor, std: float, kind: str) -> Tensor:
    """Log-prob of a step, float64, [B]."""
    squares = (next_sample.double() - mean.double()).square().flatten(1).mean(1)
    if kind == "squared_error":
        return -squares
    assert kind == "gaussian"
    return -squares / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2


def relative_error(actual: Tensor | float, expected: Tensor | float) -> float:
    """Largest error relative to max(1, |expected|)."""
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    assert actual.shape == expected.shape
    return ((actual - expected).abs() / expected.abs().clamp(min=1)).max().item()
