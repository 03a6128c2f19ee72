"""The transition x_k -> x_{k+1} of each dynamics and its log-prob, as pure functions on tensors.

With x = sample, v = velocity, s = sigma, s' = sigma_next and D = s - s' > 0, every dynamics is *linear*: the mean is
x + drift, drift = P x + Q v, with P, Q and the noise std depending only on (s, s', sigma_max, noise_level). So each is
a handful of scalars (float64) and one pass over the latents (fp32). In these terms nothing cancels, where the usual
order of operations loses up to 1e-4 at small s; and a transition is scored by x' - x - drift, which is exact where
x' - mean would carry the rounding of the mean, magnified by 1 / std.

=========  ==================================================================  ==================
dynamics   mean                                                                noise std
=========  ==================================================================  ==================
``ode``    x - D v                                                             0
``sde``    x (1 - a^2 D / 2s) - v (1 + a^2 (1 - s) / 2s) D,                    a sqrt(D)
           a = n sqrt(s / (1 - s*))
``dance``  as ``sde`` with a = n                                               n sqrt(D)
``cps``    (1 - s') x0 + sqrt(s'^2 - std^2) x1                                 s' sin(n pi / 2)
=========  ==================================================================  ==================

where n is the noise level, x0 = x - s v, x1 = x + (1 - s) v, and s* is ``sigma_max`` when s is within 1e-4
of 1 (where the Flow-SDE diffusion coefficient diverges), else s.

Sources: Flow-GRPO (arXiv 2505.05470) for ``sde``, DanceGRPO (arXiv 2505.07818) for ``dance``,
Coefficients-Preserving Sampling (arXiv 2509.05952) for ``cps``.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Dynamics = Literal["ode", "sde", "dance", "cps"]
LogProbKind = Literal["gaussian", "squared_error"]
DYNAMICS: tuple[Dynamics, ...] = get_args(Dynamics)
LOG_PROB_KINDS: tuple[LogProbKind, ...] = get_args(LogProbKind)

#: The log-prob kind that every reference trainer uses with a dynamics.
DEFAULT_LOG_PROB_KIND: dict[str, LogProbKind] = {"sde": "gaussian", "dance": "gaussian", "cps": "squared_error"}

#: Flow-SDE divides by 1 - sigma. Schedules start at 1 or just below it (UniPC: 1 - 1e-6), where the quotient
#: is infinite or absurd; within this distance of 1, sigma_max takes sigma's place, as in the references.
SIGMA_ONE_TOLERANCE = 1e-4

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def coefficients(
    dynamics: str,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    sigma_max: float | Tensor,
    noise_level: float,
) -> tuple[float | Tensor, float | Tensor, float | Tensor]:
    """Return (P, Q, noise_std) with mean = sample + P * sample + Q * velocity.

    Floats in, floats out; float64 tensors of shape [B] in, float64 tensors of shape [B] out.

    Raises:
        ValueError: unknown dynamics, or a noise level below 0 (cps: outside [0, 1]).
    """
    s, s_next, n = sigma, sigma_next, noise_level
    d = s - s_next
    if dynamics not in DYNAMICS:
        raise ValueError(f"dynamics: {dynamics!r} is unknown; pass one of {', '.join(DYNAMICS)}")
    if dynamics != "ode" and not n >= 0:
        raise ValueError(f"noise_level: {n} is below 0; pass 0 or more")
    if dynamics == "ode" or n == 0:
        return d * 0, -d, d * 0
    if dynamics == "cps":
        if n > 1:
            raise ValueError(f"noise_level: {n} is outside (0, 1], which cps needs")
        # sqrt(s'^2 - std^2) is s' cos, without the cancellation (and without a negative at n = 1).
        std, keep = s_next * math.sin(n * math.pi / 2), s_next * math.cos(n * math.pi / 2)
        return keep - s_next, keep * (1 - s) - (1 - s_next) * s, std
    a_squared = n * n * s / (1 - _away_from_one(s, sigma_max)) if dynamics == "sde" else n * n
    return -a_squared * d / (2 * s), -d * (1 + a_squared * (1 - s) / (2 * s)), (a_squared * d) ** 0.5


def _away_from_one(sigma: float | Tensor, sigma_max: float | Tensor) -> float | Tensor:
    if isinstance(sigma, Tensor):
        near = (1 - sigma).abs() <= SIGMA_ONE_TOLERANCE
        return torch.where(near, torch.as_tensor(sigma_max, dtype=sigma.dtype, device=sigma.device), sigma)
    return sigma_max if abs(1 - sigma) <= SIGMA_ONE_TOLERANCE else sigma


def transition(
    dynamics: str,
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    sigma_max: float | Tensor,
    noise_level: float,
) -> tuple[Tensor, Tensor]:
    """Mean and noise std of the step from ``sigma`` to ``sigma_next``.

    Args:
        dynamics: ``ode``, ``sde``, ``dance`` or ``cps``.
        sample: x_k, shape [B, ...], any rank >= 2 and any floating dtype.
        velocity: the denoiser's output after guidance, the shape of ``sample``, any floating dtype.
        sigma, sigma_next: noise levels in [0, 1], sigma > sigma_next; floats, or tensors of shape [B].
        sigma_max: ``sigmas[1]`` of the full schedule; read by ``sde`` near sigma = 1 only.
        noise_level: eta >= 0 (cps: in [0, 1]); 0 gives exactly the ``ode`` mean, and std 0.

    Returns:
        mean: fp32, the shape of ``sample``.
        noise_std: fp32, shape [] for float sigmas, [B] for tensor sigmas.

    Raises:
        ValueError: unknown dynamics, shapes that differ, or a noise level out of range.
    """
    drift, noise_std = drift_and_std(dynamics, sample, velocity, sigma, sigma_next, sigma_max, noise_level)
    return sample.float() + drift, torch.as_tensor(noise_std, dtype=torch.float32, device=sample.device)


def drift_and_std(
    dynamics: str,
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    sigma_max: float | Tensor,
    noise_level: float,
) -> tuple[Tensor, float | Tensor]:
    """As :func:`transition`, with the drift (mean - sample) in place of the mean, and a float std for float sigmas: no
    scalar goes to the device.
    """
    if sample.shape != velocity.shape or sample.ndim < 2:
        raise ValueError(
            f"sample and velocity need one shape [B, ...], not {list(sample.shape)} and {list(velocity.shape)}"
        )
    x, v = sample.float(), velocity.float()
    if isinstance(sigma, Tensor) or isinstance(sigma_next, Tensor):
        s, s_next, s_max = (_per_sample(value, sample) for value in (sigma, sigma_next, sigma_max))
        p, q, std = coefficients(dynamics, s, s_next, s_max, noise_level)
        rows = (-1,) + (1,) * (sample.ndim - 1)
        p, q, std = (torch.as_tensor(value, dtype=torch.float32) for value in (p, q, std))
        drift = q.view(rows) * v if dynamics == "ode" or noise_level == 0 else p.view(rows) * x + q.view(rows) * v
        return drift, std
    p, q, std = coefficients(dynamics, sigma, sigma_next, sigma_max, noise_level)
    # Separate products and sums, never an fma: so that `ode` is bit-identical to diffusers' `sample + dt * v`.
    drift = q * v if p == 0 else p * x + q * v
    return drift, std


def _per_sample(sigma: float | Tensor, sample: Tensor) -> Tensor:
    return torch.as_tensor(sigma, dtype=torch.float64, device=sample.device).expand(sample.shape[0])


def log_prob(next_sample: Tensor, mean: Tensor, noise_std: float | Tensor, kind: str = "gaussian") -> Tensor:
    """Log-prob of a transition, averaged over all but the batch dimension.

    ``gaussian``: -(x' - mean)^2 / 2 std^2 - ln std - ln(2 pi) / 2, the full density (``sde`` and ``dance`` in
    every reference). ``squared_error``: -(x' - mean)^2, without std and constants (``cps`` in every reference).

    Args:
        next_sample: x_{k+1} as it was sent (already rounded to the wire dtype), shape [B, ...].
        mean: from :func:`transition`, fp32, shape [B, ...].
        noise_std: from :func:`transition`; a float, or a tensor of shape [] or [B]; > 0.
        kind: ``gaussian`` or ``squared_error``.

    Returns:
        fp32, shape [B].

    Raises:
        ValueError: unknown kind, shapes that differ, or, for ``gaussian``, a zero std (the step is deterministic).
            A std that lives on an accelerator is not read, and a zero there gives NaN.
    """
    if next_sample.shape != mean.shape:
        raise ValueError(f"next_sample and mean differ in shape: {list(next_sample.shape)}, {list(mean.shape)}")
    return log_prob_of_error(next_sample.float() - mean.float(), noise_std, kind)


def log_prob_of_error(error: Tensor, noise_std: float | Tensor, kind: str = "gaussian") -> Tensor:
    """As :func:`log_prob`, given x' - mean (fp32, [B, ...])."""
    if kind not in LOG_PROB_KINDS:
        raise ValueError(f"log_prob_kind: {kind!r} is unknown; pass one of {', '.join(LOG_PROB_KINDS)}")
    if kind == "squared_error":
        return -error.square().flatten(1).mean(1)
    if isinstance(noise_std, Tensor):
        std = noise_std.float().to(error.device)
        positive = std.device.type != "cpu" or bool((std > 0).all())
        log_std: float | Tensor = std.log()
        std_rows: float | Tensor = std.view((-1,) + (1,) * (error.ndim - 1)) if std.ndim else std
    else:
        positive, std_rows, log_std = noise_std > 0, noise_std, math.log(max(noise_std, 1e-300))
    if not positive:
        raise ValueError("noise_std: a step whose std is 0 is deterministic and has no log-prob")
    return -0.5 * (error / std_rows).square().flatten(1).mean(1) - log_std - _HALF_LOG_TWO_PI
