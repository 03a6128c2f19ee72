"""The clipped objective of Flow-GRPO, its KL term, and the ratio normalisation of GRPO-Guard.

Log-probs here are those of the rollout and of replay: means over the D elements of a latent, not sums. So a
log-ratio, a KL divergence and GRPO-Guard's bias are all per element, 1/D of the true ones; exp(log-ratio) is the D-th
root of the true importance ratio; and clip ranges are tiny (1e-4 for Flow-GRPO, 2e-6 for GRPO-Guard).

Tensors line up at the *first* dimension: advantages or stds of shape [B] against log-probs of shape [B, S] mean one
per sample, as if they had the shape [B, 1]. One per step has the shape [1, S].

Half-precision inputs are computed in float32; float64 stays float64. Nothing here reads a value on an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """A loss and what to log of it. Only ``loss`` carries gradients; all but ``ratio`` are scalars, shape []."""

    loss: Tensor
    """policy_loss + kl_weight * kl; what to call ``backward`` on."""
    policy_loss: Tensor
    """The clipped objective, negated: lower is better."""
    kl: Tensor
    """Mean of the ``kl`` that was given, unweighted; 0 without."""
    ratio: Tensor
    """exp(log_prob - old_log_prob), the shape of log_prob; exactly 1 before the first update."""
    clip_fraction: Tensor
    """Share of ratios outside the clip range, in [0, 1], on either side and whatever the advantage's sign."""
    approx_kl: Tensor
    """Mean of (log_prob - old_log_prob)^2 / 2."""


def flow_grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_range: float | tuple[float, float] = 1e-4,
    kl: Tensor | None = None,
    kl_weight: float = 0.0,
) -> LossTerms:
    """The clipped policy objective of PPO over transitions, as in Flow-GRPO (arXiv 2505.05470) and its code.

    loss = mean(max(-A r, -A clamp(r, 1 - low, 1 + high))) + kl_weight * mean(kl), r = exp(log_prob - old_log_prob).
    The mean is over all elements; to go step by step with flat memory, call it per step and divide each loss by the
    number of steps. Gradients flow through ``log_prob`` and ``kl`` only.

    For GRPO-Guard pass :func:`guard_normalise` as ``log_prob``, zeros as ``old_log_prob``, and the advantages times
    :func:`guard_step_weights`: a positive weight on an advantage is that weight on its term of the objective.

    Args:
        log_prob: of the policy in training, from replay, shape [...], usually [B] or [B, S].
        old_log_prob: of the policy that generated, from the rollout; the same shape.
        advantages: shape [...], or its first dimensions ([B] for [B, S]), or with 1 in place of any of them.
        clip_range: low = high > 0, or (low, high) for different bounds; low at most 1.
        kl: KL divergence from the reference policy, any shape with elements, for example from :func:`gaussian_kl`.
        kl_weight: 0 or more (Flow-GRPO's beta).

    Returns:
        In the dtype of ``log_prob``, float32 for half precision.

    Raises:
        ValueError: shapes that do not fit, no elements, or a clip range or weight out of range.
    """
    if log_prob.shape != old_log_prob.shape:
        raise ValueError(f"old_log_prob: shape {list(old_log_prob.shape)}; pass {list(log_prob.shape)}, as log_prob")
    if not log_prob.numel():
        raise ValueError(f"log_prob: shape {list(log_prob.shape)} has no elements; pass at least one transition")
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    if not (0 < low <= 1 and 0 < high < math.inf):
        raise ValueError(f"clip_range: {clip_range} cannot be clipped to; pass more than 0, and at most 1 below")
    if not 0 <= kl_weight < math.inf:
        raise ValueError(f"kl_weight: {kl_weight} is out of range; pass 0 or more")
    if kl is None and kl_weight:
        raise ValueError(f"kl_weight: {kl_weight} without kl; pass kl too, for example from gaussian_kl")
    if kl is not None and not kl.numel():
        raise ValueError(f"kl: shape {list(kl.shape)} has no elements; pass at least one, or None")

    log_prob = _full(log_prob)
    weight = _align("advantages", advantages.detach().to(log_prob), log_prob.shape)
    log_ratio = log_prob - old_log_prob.detach().to(log_prob)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    policy_loss = torch.maximum(-weight * ratio, -weight * clipped).mean()
    kl_mean = policy_loss.new_zeros(()) if kl is None else _full(kl).mean().to(policy_loss)
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    return LossTerms(
        loss=policy_loss + kl_weight * kl_mean if kl_weight else policy_loss,
        policy_loss=policy_loss.detach(),
        kl=kl_mean.detach(),
        ratio=ratio.detach(),
        clip_fraction=outside.to(ratio.dtype).mean(),
        approx_kl=log_ratio.detach().square().mean() / 2,
    )


def gaussian_kl(mean: Tensor, reference_mean: Tensor, noise_std: float | Tensor) -> Tensor:
    """KL divergence between the transitions of two policies from the same x_k: Gaussians of one std.

    (mean - reference_mean)^2 / 2 noise_std^2, averaged over the elements of a latent as log-probs are: 1/D of the KL
    divergence in nats. The closed form of Flow-GRPO (arXiv 2505.05470), per element. Flow-GRPO's code leaves the step's
    D = sigmas[k] - sigmas[k+1] out of the std and so gets D times this for ``sde``; pass noise_std / sqrt(D) for its
    number.

    Args:
        mean: of the policy in training, shape [B, ...], from replay; carries gradients.
        reference_mean: of the reference policy, the same shape; taken as a constant.
        noise_std: full std of the transition (``ReplayedStep.noise_std``; for ``sde`` a sqrt(D)), > 0. A float or a
            tensor of shape [] for all samples; [B]; or [B, S] for means of shape [B, S, ...] (1 stands for any size).

    Returns:
        float32 (float64 for float64 means), shape [B], or [B, S] for a ``noise_std`` of two dimensions.

    Raises:
        ValueError: shapes that do not fit, or a std that is not positive (the step is deterministic). A std on an
            accelerator is not read, and a 0 there gives inf or NaN.
    """
    batch_dims = max(1, noise_std.ndim if isinstance(noise_std, Tensor) else 0)
    squared = _mean_square_difference("reference_mean", mean, reference_mean, batch_dims)
    return squared / (2 * _std(noise_std, squared) ** 2)


def guard_normalise(log_ratio: Tensor, mean: Tensor, old_mean: Tensor, noise_std: float | Tensor) -> Tensor:
    """Log-ratio of GRPO-Guard (RatioNorm, arXiv 2510.22319): centred at 0, with the step's noise std taken out.

    noise_std * (log_ratio + (mean - old_mean)^2 / 2 noise_std^2), the square averaged over the elements of a latent,
    where the paper sums it: per sample, and in the convention of our log-probs and of the paper's code.

    With x_{k+1} = old_mean + noise_std * eps a log-ratio is <eps, mean - old_mean> / noise_std less the squared term
    (<> averages over elements). That term is negative for every update, however good, and pushes ratios out of reach
    of the upper clip bound; and the std makes the spread differ from step to step. What is left here is
    <eps, mean - old_mean>: mean 0 over eps, and a gradient by ``mean`` that does not depend on the std.

    Args:
        log_ratio: log_prob - old_log_prob of kind ``gaussian``, shape [B] or [B, S]; for ``squared_error`` divide the
            difference by 2 noise_std^2 first. Carries gradients.
        mean: of the policy in training, shape [*log_ratio.shape, ...]; carries gradients.
        old_mean: of the policy that generated, the same shape; taken as a constant.
        noise_std: full std of the transition, the paper's sigma_t sqrt(dt), > 0. A float, or a tensor of shape [],
            of log_ratio's shape, or of its first dimensions (1 stands for any size).

    Returns:
        The shape of ``log_ratio``, float32 (float64 if means or log-ratio are). Its exp is the ratio to clip.

    Raises:
        ValueError: shapes that do not fit, or a std that is not positive. A std on an accelerator is not read.
    """
    if not log_ratio.ndim or mean.shape[: log_ratio.ndim] != log_ratio.shape:
        raise ValueError(f"log_ratio: shape {list(log_ratio.shape)} for means {list(mean.shape)}; pass [B] or [B, S]")
    squared = _mean_square_difference("old_mean", mean, old_mean, log_ratio.ndim)
    std = _std(noise_std, squared)
    return std * _full(log_ratio) + squared / (2 * std)


def guard_step_weights(
    sigmas: Tensor | Sequence[float], steps: Sequence[int] | None = None, *, normalise: bool = True
) -> Tensor:
    """Weights of the steps' policy losses that even out their gradients (GRPO-Guard, arXiv 2510.22319).

    w_k = 1 / D_k, D_k = sigmas[k] - sigmas[k+1]. After :func:`guard_normalise` the gradient of a log-ratio by the mean
    is the same at every step, but the mean moves with the velocity in proportion to D_k, so long steps would dominate.
    Exactly so for ``sde``, by -D_k (1 + noise_level^2 / 2) (but for a first step at sigma 1); for ``dance`` and ``cps``
    another factor that varies with sigma remains.

    Args:
        sigmas: the full schedule, [T+1], falling; a tensor (``Trajectory.sigmas``) or numbers.
        steps: the S steps to weight, each in [0, T), such as ``Trajectory.stochastic_steps``; None for all T.
        normalise: scale the weights to a mean of 1 over ``steps``, so that learning rate and kl_weight keep their
            meaning; False for the plain 1 / D_k of the paper's code.

    Returns:
        float32 [S], on the device of ``sigmas``.

    Raises:
        ValueError: sigmas that are not a falling schedule, or steps out of range or none.
    """
    schedule = sigmas.detach() if isinstance(sigmas, Tensor) else torch.as_tensor(sigmas, dtype=torch.float64)
    device, schedule = schedule.device, schedule.to("cpu", torch.float64)
    if schedule.ndim != 1 or len(schedule) < 2 or not bool(schedule.isfinite().all() & (schedule.diff() < 0).all()):
        raise ValueError("sigmas: not a falling schedule; pass T+1 noise levels, each below the one before")
    num_steps = len(schedule) - 1
    chosen = list(range(num_steps) if steps is None else steps)
    if not chosen or not all(0 <= k < num_steps for k in chosen):
        raise ValueError(
            f"steps: {chosen} of a schedule of {num_steps} steps; pass one or more of 0 to {num_steps - 1}"
        )
    weights = (-1 / schedule.diff())[chosen]
    return (weights / weights.mean() if normalise else weights).to(device, torch.float32)


def _full(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _align(name: str, x: Tensor, shape: torch.Size) -> Tensor:
    """``x`` with 1s appended, so that it broadcasts against ``shape`` from the first dimension on."""
    if x.ndim > len(shape) or any(n not in (1, of) for n, of in zip(x.shape, shape, strict=False)):
        raise ValueError(f"{name}: shape {list(x.shape)}; pass {list(shape)} or its first dimensions")
    return x.reshape(*x.shape, *(1,) * (len(shape) - x.ndim))


def _mean_square_difference(name: str, mean: Tensor, constant: Tensor, batch_dims: int) -> Tensor:
    if mean.shape != constant.shape:
        raise ValueError(f"{name}: shape {list(constant.shape)}; pass {list(mean.shape)}, as mean")
    if mean.ndim <= batch_dims:
        raise ValueError(f"mean: shape {list(mean.shape)} has no latent dimensions after {batch_dims} of the batch")
    return (_full(mean) - _full(constant.detach())).square().flatten(batch_dims).mean(-1)


def _std(noise_std: float | Tensor, like: Tensor) -> float | Tensor:
    if not isinstance(noise_std, Tensor):
        positive, std = noise_std > 0, noise_std
    else:
        # Read before it moves: never on an accelerator.
        positive = noise_std.device.type != "cpu" or bool((noise_std.to(like.dtype) > 0).all())
        std = _align("noise_std", noise_std.detach().to(like), like.shape)
    if not positive:
        raise ValueError("noise_std: a step whose std is 0 is deterministic and has no ratio; pass stds above 0")
    return std
