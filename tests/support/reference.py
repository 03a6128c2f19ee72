"""Independent float64 evaluation of transitions, written from the published formulas and not from our code."""

from __future__ import annotations

import math

from torch import Tensor


def mean_and_std(
    dynamics: str, x: Tensor, v: Tensor, s: float, s_next: float, s_max: float, n: float
) -> tuple[Tensor, float]:
    """Mean (float64) and noise std of a step."""
    x, v = x.double(), v.double()
    d = s - s_next
    x0, x1 = x - s * v, x + (1 - s) * v
    if dynamics == "sde":
        s_star = s_max if abs(1 - s) <= 1e-4 else s
        a = n * math.sqrt(s / (1 - s_star))
        return x * (1 - a * a * d / (2 * s)) - v * (1 + a * a * (1 - s) / (2 * s)) * d, a * math.sqrt(d)
    if dynamics == "dance":
        return x - d * (v + n * n * (x - (1 - s) * x0) / (2 * s * s)), n * math.sqrt(d)
    if dynamics == "cps":
        std = s_next * math.sin(n * math.pi / 2)
        return (1 - s_next) * x0 + math.sqrt(max(s_next * s_next - std * std, 0.0)) * x1, std
    return x - d * v, 0.0


def log_prob(x_next: Tensor, mean: Tensor, std: float, kind: str) -> Tensor:
    """Log-prob per sample, float64, mean over all but dimension 0."""
    squared = (x_next.double() - mean) ** 2
    if kind == "squared_error":
        return -squared.flatten(1).mean(1)
    return (-squared / (2 * std * std) - math.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """max |value - expected| / max(1, |expected|)."""
    return float(((value.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)).max())
