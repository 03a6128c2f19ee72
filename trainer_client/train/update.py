"""One policy update from one rollout: the clipped objective over replayed transitions, with flat memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..algorithms import LossTerms, derive_seed, flow_grpo_loss, gaussian_kl, group_advantages
from ..errors import RolloutError
from ..replay import replay
from .config import TrainConfig
from .lora import LoraPolicy
from .metrics import UpdateMetrics
from .sampler import Group, Rollout


def make_optimizer(policy: LoraPolicy, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the adapter, in the order of its names."""
    return torch.optim.AdamW(
        policy.parameters().values(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )


def learning_rate(config: TrainConfig, iteration: int) -> float:
    """Linear up to the full rate over the first ``warmup_iterations``, then constant."""
    return config.learning_rate * min(1.0, (iteration + 1) / (config.warmup_iterations or 1))


def advantages(rollout: Rollout, rewards: Tensor, config: TrainConfig) -> tuple[Tensor, ...]:
    """Advantages of each group, float32 [K], from the rewards of all samples in order, [N]."""
    sizes = [len(group.samples) for group in rollout.groups]
    ids = [number for number, size in enumerate(sizes) for _ in range(size)]
    values = group_advantages(
        rewards, ids, std=config.advantage_std, epsilon=config.advantage_epsilon, clip=config.advantage_clip
    )
    return values.split(sizes)


def update(
    policy: LoraPolicy,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    group_values: Sequence[Tensor],
    config: TrainConfig,
    iteration: int,
) -> UpdateMetrics:
    """Descend the loss of a rollout: ``num_epochs`` passes in ``num_minibatches`` optimizer steps each.

    A group is one batch, as in the rollout, so that ratios are exactly 1 before the first step. Backward runs for each
    step of each group. A group whose advantages are all 0 has no gradient, and is not replayed without a KL term.

    Args:
        policy: changed.
        optimizer: over its parameters.
        rollout: what to learn from.
        group_values: advantages of each group, [K].
        config: of the run.
        iteration: sets the learning rate and the order of the groups.

    Raises:
        RolloutError: the gradient is not finite.
    """
    for parameters in optimizer.param_groups:
        parameters["lr"] = learning_rate(config, iteration)
    weights = policy.parameters()
    count = min(config.num_minibatches, len(rollout.groups))
    minibatches: list[list[LossTerms]] = []
    losses: list[float] = []
    norms: list[float] = []
    for epoch in range(config.num_epochs):
        seed = derive_seed(config.seed, "minibatches", iteration, epoch)
        order = torch.randperm(len(rollout.groups), generator=torch.Generator().manual_seed(seed)).tolist()
        for chosen in (order[start::count] for start in range(count)):
            samples = sum(len(rollout.groups[index].samples) for index in chosen)
            terms: list[LossTerms] = []
            shares: list[float] = []
            for index in chosen:
                group = rollout.groups[index]
                share = len(group.samples) / samples / len(group.trajectory.stochastic_steps)
                found = _accumulate(policy, group, group_values[index], share, config)
                terms += found
                shares += [share] * len(found)
            minibatches.append(terms)
            losses.append(sum(float(t.loss) * share for t, share in zip(terms, shares, strict=True)))
            norms.append(_step(optimizer, weights, config.max_grad_norm, iteration))
    everything = [term for terms in minibatches for term in terms]
    return UpdateMetrics(
        first_ratio_error=_ratio_error(minibatches[0]),
        ratio_error=_ratio_error(everything),
        clip_fraction=_mean([term.clip_fraction for term in everything]),
        kl=_mean([term.kl for term in everything]),
        approx_kl=_mean([term.approx_kl for term in everything]),
        loss=sum(losses) / len(losses),
        grad_norm=max(norms),
    )


def _accumulate(policy: LoraPolicy, group: Group, values: Tensor, share: float, config: TrainConfig) -> list[LossTerms]:
    """Add a group's gradient: ``share`` times the sum of its steps' losses."""
    if not config.kl_weight and not bool(values.any()):
        return []
    trajectory, prompts = group.trajectory, [group.prompt_index]
    references: dict[int, Tensor] = {}
    if config.kl_weight:
        with policy.base():
            for step in replay(policy.pipe, trajectory, prompts=prompts, grad=False):
                references[step.step_index] = step.mean
    found = []
    for step in replay(policy.pipe, trajectory, prompts=prompts):
        assert step.log_prob is not None  # only stochastic steps are replayed
        column = trajectory.stochastic_steps.index(step.step_index)
        old = trajectory.log_probs[list(step.sample_indices), column].to(step.log_prob.device)
        kl = gaussian_kl(step.mean, references[step.step_index], step.noise_std) if references else None
        terms = flow_grpo_loss(
            step.log_prob, old, values, clip_range=config.clip_range, kl=kl, kl_weight=config.kl_weight
        )
        (terms.loss * share).backward()
        found.append(replace(terms, loss=terms.loss.detach()))
    return found


def _step(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, nn.Parameter], max_norm: float, iteration: int
) -> float:
    """Clip and step; returns the norm before clipping. Nothing without gradients."""
    gradients = [weight for weight in weights.values() if weight.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.clip_grad_norm_(gradients, max_norm)
    if not bool(norm.isfinite()):
        raise RolloutError(f"iteration {iteration}: the gradient is not finite; lower --learning-rate or --noise-level")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def _ratio_error(terms: Sequence[LossTerms]) -> float:
    return float(torch.stack([(term.ratio - 1).abs().max() for term in terms]).max()) if terms else 0.0


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).mean()) if values else 0.0
