"""The training loop: roll out on a server, score, update a LoRA here, push it there, again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusion_rollout.v1 import policy_pb2
from diffusion_rollout.v1 import rollout_pb2 as pb

from rollout_service.tensors import TORCH_DTYPES

from ..algorithms import derive_seed
from ..client import RolloutClient
from ..errors import RolloutError
from ..verify import load_policy
from .checkpoint import RunState, checkpoints, load_state, load_weights, save_checkpoint
from .config import FIXED_ON_RESUME, TrainConfig, TrainConfigError
from .lora import LoraPolicy, add_lora
from .metrics import Display, Evaluation, IterationMetrics, RunLog, Seconds
from .plugins import PromptSets, Reward, load_prompts, load_reward, model_source, score
from .sampler import Rollout, Sampler
from .update import advantages, learning_rate, make_optimizer, update


@dataclass(frozen=True)
class TrainResult:
    """What a run has come to."""

    output: Path
    """Its directory."""
    version: int
    """Policy version on the server of the adapter in training."""
    metrics: tuple[IterationMetrics, ...]
    """Of each iteration, those before a resumption included."""
    evaluations: tuple[Evaluation, ...]


def train(config: TrainConfig, on_iteration: Callable[[IterationMetrics], None] | None = None) -> TrainResult:
    """Train a LoRA with Flow-GRPO (arXiv 2505.05470) on rollouts of a running server.

    Each iteration rolls out groups of samples on one policy version, scores them, descends the clipped objective over
    replayed transitions, and pushes the adapter as the next version. All randomness follows from ``config.seed``.

    Args:
        config: settings.
        on_iteration: called with the metrics of each iteration.

    Raises:
        TrainConfigError: a setting that cannot be used.
        RolloutError: the typed error of the server, or a checkpoint that cannot be read.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    reward, prompts = load_reward(config.reward), load_prompts(config.prompts, config.held_out_prompts)
    checkpoint = _checkpoint_to_resume(config)
    state = load_state(checkpoint) if checkpoint else RunState(0, 0, 0)
    _check_resumable(config, state)
    # The client is closed first, which ends a rollout that the pool still waits for.
    with ThreadPoolExecutor(1, "rollout") as pool, RolloutClient(config.target) as client:
        facts = client.server_info()
        sampler = Sampler(client, config, facts)
        policy = _load_policy(config, facts)
        optimizer = make_optimizer(policy, config)
        if checkpoint:
            load_weights(checkpoint, policy, optimizer)
        publisher = Publisher(client, policy, config, state.version)
        state = publisher.restore(state)
        with (
            RunLog(config, state.iteration) as log,
            Display(config.progress, config.iterations, state.iteration) as bar,
        ):

            def record(entry: IterationMetrics | Evaluation) -> None:
                log.add(entry)
                bar.add(entry)

            def evaluate_at(iteration: int) -> None:
                if not any(done.iteration == iteration for done in log.evaluations):
                    record(evaluate(sampler, reward, prompts, config, state))

            if config.evaluate_every and not log.evaluations:
                evaluate_at(state.iteration)
            pending: Future[Rollout] | None = None
            for iteration in range(state.iteration, config.iterations):
                began = time.monotonic()
                rollout = (
                    pending.result() if pending else sampler.rollout(iteration, prompts.train, state.rollout_version)
                )
                pending = None
                if config.staleness and iteration + 1 < config.iterations:
                    pending = pool.submit(sampler.rollout, iteration + 1, prompts.train, state.version)
                metrics, state = _iterate(policy, optimizer, publisher, reward, rollout, config, state, began)
                record(metrics)
                if on_iteration is not None:
                    on_iteration(metrics)
                last = state.iteration == config.iterations
                if last or state.iteration % config.checkpoint_every == 0:
                    save_checkpoint(config.output / "checkpoints", policy, optimizer, state, config.keep_checkpoints)
                if config.evaluate_every and (last or state.iteration % config.evaluate_every == 0):
                    evaluate_at(state.iteration)
            return TrainResult(config.output, state.version, tuple(log.metrics), tuple(log.evaluations))


def evaluate(sampler: Sampler, reward: Reward, prompts: PromptSets, config: TrainConfig, state: RunState) -> Evaluation:
    """Mean rewards of the policy that is on the server, on the prompts that are trained on and on the held-out ones."""
    began = time.monotonic()
    train_set, held_out = (part[: config.evaluation_prompts] for part in (prompts.train, prompts.held_out))
    rollout = sampler.evaluation([*train_set, *held_out], state.version)
    rewards = _score(reward, rollout)
    trained = torch.tensor([group.prompt in set(train_set) for group in rollout.groups for _ in group.samples])
    return Evaluation(
        iteration=state.iteration,
        policy_version=state.version,
        reward=float(rewards[trained].mean()),
        held_out_reward=float(rewards[~trained].mean()) if held_out else None,
        num_samples=rollout.num_samples,
        seconds=time.monotonic() - began,
    )


class Publisher:
    """Keeps the server's policy versions those of a run.

    Args:
        client: connected to the server.
        policy: what is pushed.
        config: of the run.
        version: the newest one of the run so far.
    """

    def __init__(self, client: RolloutClient, policy: LoraPolicy, config: TrainConfig, version: int) -> None:
        self._client, self._policy, self._config = client, policy, config
        self._listed = {listed.version: listed for listed in client.list_policies()}
        self._next = max([version, *self._listed]) + 1

    def push(self, state: RunState) -> tuple[RunState, policy_pb2.PolicyVersion]:
        """Push the adapter as the next version, make it current, and delete this run's oldest versions.

        Raises:
            RolloutError: the server refuses it.
        """
        pushed = self._client.push_policy(self._policy.state(), self._next, lora=self._policy.config)
        self._next += 1
        versions = self._prune((*state.versions, pushed.version))
        changed = {"version": pushed.version, "versions": versions, "sha256": pushed.sha256.hex()}
        return replace(state, **changed), pushed

    def restore(self, state: RunState) -> RunState:
        """After a resumption: see that the adapter is on the server, under its own version or, if need be, a new one.

        Raises:
            RolloutError: the server refuses it.
        """
        if not state.version:
            return state
        listed = self._listed.get(state.version)
        current = listed is not None and listed.state == policy_pb2.POLICY_STATE_CURRENT
        if listed is None or not (current and listed.sha256.hex() == state.sha256):
            same = state.rollout_version == state.version
            state, _ = self.push(state)
            state = replace(state, rollout_version=state.version) if same else state
        usable = (policy_pb2.POLICY_STATE_READY, policy_pb2.POLICY_STATE_CURRENT)
        known = {number for number, listed in self._listed.items() if listed.state in usable} | {0, state.version}
        return state if state.rollout_version in known else replace(state, rollout_version=state.version)

    def _prune(self, versions: Sequence[int]) -> tuple[int, ...]:
        """Delete all but the newest; those still in use are tried again after the next push."""
        if not self._config.keep_versions:
            return tuple(versions)
        keep = max(self._config.keep_versions, 1 + self._config.staleness)
        left = []
        for version in versions[:-keep]:
            try:
                self._client.delete_policy(version)
            except RolloutError:
                left.append(version)
        return (*left, *versions[-keep:])


def _iterate(
    policy: LoraPolicy,
    optimizer: torch.optim.Optimizer,
    publisher: Publisher,
    reward: Reward,
    rollout: Rollout,
    config: TrainConfig,
    state: RunState,
    began: float,
) -> tuple[IterationMetrics, RunState]:
    """Score, update, push; ``began`` is when the wait for the rollout did (monotonic seconds)."""
    received = time.monotonic()
    rewards = _score(reward, rollout)
    scored = time.monotonic()
    updated = update(policy, optimizer, rollout, advantages(rollout, rewards, config), config, state.iteration)
    trained = time.monotonic()
    after, pushed = publisher.push(state)
    ended = time.monotonic()
    metrics = IterationMetrics(
        iteration=state.iteration,
        rollout_version=rollout.version,
        policy_version=after.version,
        fingerprint=f"{pushed.fingerprint:016x}" if pushed.fingerprint else "",
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        num_samples=rollout.num_samples,
        failed_samples=rollout.failed_samples,
        stochastic_steps=rollout.stochastic_steps,
        learning_rate=learning_rate(config, state.iteration),
        **vars(updated),
        seconds=Seconds(
            rollout=rollout.seconds,
            reward=scored - received,
            train=trained - scored,
            push=ended - trained,
            total=ended - began,
        ),
    )
    after = replace(
        after,
        iteration=state.iteration + 1,
        rollout_version=state.version if config.staleness else after.version,
        config=config.model_dump(mode="json"),
        metrics={"reward_mean": metrics.reward_mean},
    )
    return metrics, after


def _score(reward: Reward, rollout: Rollout) -> torch.Tensor:
    images = [image for group in rollout.groups for image in group.images()]
    return score(reward, images, [group.prompt for group in rollout.groups for _ in group.samples])


def _load_policy(config: TrainConfig, facts: pb.GetServerInfoResponse) -> LoraPolicy:
    source = model_source(config.model)
    dtype = getattr(torch, config.dtype) if config.dtype else TORCH_DTYPES[facts.model_dtype]
    try:
        pipe = load_policy(source, dtype, config.device)
    except (OSError, ValueError) as error:
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainConfigError("model", f"{config.model}: cannot be loaded: {detail[0]}") from error
    if type(pipe).__name__ != facts.pipeline_class:
        raise TrainConfigError(
            "model",
            f"{config.model} is a {type(pipe).__name__}, the server has a {facts.pipeline_class}; pass its model",
        )
    policy = add_lora(
        pipe,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        targets=config.lora_targets,
        seed=derive_seed(config.seed, "lora"),
    )
    if config.gradient_checkpointing:
        for module in policy.denoisers.values():
            enable: Any = getattr(module, "enable_gradient_checkpointing", None)
            if enable is None:
                raise TrainConfigError("gradient_checkpointing", f"{type(module).__name__} has none; leave it out")
            enable()
    return policy


def _checkpoint_to_resume(config: TrainConfig) -> Path | None:
    found = checkpoints(config.output / "checkpoints")
    if found and not config.resume:
        raise TrainConfigError("output", f"{config.output} holds a run; pass --resume, or another directory")
    return found[-1] if found else None


def _check_resumable(config: TrainConfig, state: RunState) -> None:
    now = config.model_dump(mode="json")
    for field in FIXED_ON_RESUME if state.config else ():
        if state.config.get(field) != now[field]:
            raise TrainConfigError(
                field, f"the run in {config.output} has {state.config.get(field)!r}, not {now[field]!r}; keep it"
            )
