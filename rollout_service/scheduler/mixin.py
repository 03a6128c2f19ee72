"""A diffusers scheduler that draws, scores and hands out every step of a rollout.

Three states. **off**: the scheduler is its parent, bit for bit. **rollout** (:meth:`SchedulerRLMixin.prepare_rollout`):
``step`` computes the mean in fp32, draws, rounds to the wire dtype, scores the rounded value and continues from
it, so that a log-prob always belongs to the bytes that left. **replay** (:meth:`SchedulerRLMixin.prepare_replay`):
``step`` is given x_{k+1} and scores it, with gradients where autograd is on.

In a plain diffusers script::

    pipe.scheduler = RolloutFlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    args = RolloutArgs(dynamics="sde", noise_level=0.7)
    noise = pipe.scheduler.prepare_rollout(args, seeds=[1, 2])
    pipe("a red circle", num_images_per_prompt=2, generator=noise.initial_generators())
    log_probs = pipe.scheduler.collect_rollout_log_probs()  # [2, T]
    pipe.scheduler.release_rollout_resources()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import Tensor

from .args import RolloutArgs, RolloutArgsError, validate_indices, validate_sigmas
from .dynamics import drift_and_std, log_prob_of_error
from .noise import NoiseSource


@dataclass(frozen=True)
class StepRecord:
    """One step of a batch of B samples: x_k -> x_{k+1}."""

    step_index: int
    """Absolute k in [0, T)."""
    sigma: float
    sigma_next: float
    noise_std: float
    """Std of the injected noise (an exact fp32 value); 0.0 for a deterministic step."""
    sample: Tensor
    """x_k in the wire dtype, [B, ...]."""
    next_sample: Tensor
    """x_{k+1} in the wire dtype, [B, ...]."""
    log_prob: Tensor | None
    """fp32 [B]; None for a deterministic step."""
    mean: Tensor | None = None
    """fp32 [B, ...]. In a rollout only if asked for; in a replay always."""
    noise: Tensor | None = None
    """fp32 [B, ...], if asked for; None for a deterministic step."""
    velocity: Tensor | None = None
    """[B, ...] in the dtype in which the pipeline handed it over, if asked for."""

    @property
    def stochastic(self) -> bool:
        """Whether the step injected noise, and so has a log-prob."""
        return self.noise_std > 0


@dataclass
class _Rollout:
    """State of a rollout: steps ``start_step`` .. T-1."""

    args: RolloutArgs
    noise: NoiseSource
    sink: Callable[[StepRecord], None]
    start_step: int
    fast_forwarded: bool = False

    def steps(self, num_steps: int) -> tuple[int, ...]:
        if self.start_step >= num_steps:
            raise RolloutArgsError(
                "start_step", f"{self.start_step} is not a step of {num_steps}; pass 0 to {num_steps - 1}"
            )
        return tuple(range(self.start_step, num_steps))


@dataclass
class _Replay:
    """State of a replay: the given steps only, each from its stored latents."""

    args: RolloutArgs
    latents: Mapping[int, Tensor]
    replayed: tuple[int, ...]
    sink: Callable[[StepRecord], None]

    def steps(self, num_steps: int) -> tuple[int, ...]:
        return self.replayed


@dataclass
class _Schedule:
    """The full schedule, and the part of it that this call of the pipeline runs."""

    sigmas: tuple[float, ...]
    sigmas_fp32: Tensor
    steps: tuple[int, ...]
    position: int = field(default=0)


class SchedulerRLMixin:
    """Adds the rollout and replay states to a flow-matching Euler scheduler class (list it before the class)."""

    _state: _Rollout | _Replay | None = None
    _schedule: _Schedule | None = None
    _records: list[StepRecord] | None = None

    def prepare_rollout(
        self,
        args: RolloutArgs,
        seeds: Sequence[int],
        *,
        initial_noise_seeds: Sequence[int | None] | None = None,
        start_step: int = 0,
        sink: Callable[[StepRecord], None] | None = None,
    ) -> NoiseSource:
        """Enter the rollout state for one call of the pipeline.

        Args:
            args: the sampling settings.
            seeds: one per sample of the batch, in the pipeline's order, in [0, 2^64).
            initial_noise_seeds: seeds of x_0 where they differ from ``seeds``.
            start_step: k of the first step; the latents that the pipeline starts from are x_k.
            sink: called with each :class:`StepRecord` as it is made. Without one, records are kept for
                :meth:`collect_rollout_log_probs`.

        Returns:
            The source of noise: pass ``initial_generators()`` to the pipeline as ``generator``.

        Raises:
            RolloutArgsError: a setting that cannot be run.
        """
        args.validate()
        if start_step < 0:
            raise RolloutArgsError("start_step", f"{start_step} is below 0; pass the first step to run")
        self._check_supported()
        self._records = []
        noise = NoiseSource(seeds, args.noise_mode, initial_noise_seeds)
        self._state = _Rollout(args, noise, sink or self._records.append, start_step)
        return noise

    def prepare_replay(
        self,
        args: RolloutArgs,
        latents: Mapping[int, Tensor],
        *,
        steps: Sequence[int],
        sink: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """Enter the replay state for one call of the pipeline.

        Args:
            args: the rollout's settings; ``sigmas`` must be the rollout's schedule.
            latents: stored x_k by absolute k, wire dtype, each [B, ...]; k and k + 1 for each of ``steps``.
            steps: the steps to score, strictly increasing; the pipeline runs the denoiser for these only.
            sink: called with each :class:`StepRecord`; without one, records are kept.

        Raises:
            RolloutArgsError: a setting that cannot be run, or latents that are missing.
        """
        args.validate()
        self._check_supported()
        if args.sigmas is None:
            raise RolloutArgsError("sigmas", "needed by a replay; pass the schedule that the rollout reported")
        if not steps:
            raise RolloutArgsError("steps", "none given; pass the steps to score")
        validate_indices("steps", tuple(steps), len(args.sigmas) - 1)
        missing = sorted({k for step in steps for k in (step, step + 1)} - set(latents))
        if missing:
            raise RolloutArgsError("latents", f"x_k missing for k in {missing}; ask the rollout to return them")
        self._records = []
        self._state = _Replay(args, latents, tuple(steps), sink or self._records.append)

    def collect_rollout_log_probs(self) -> Tensor:
        """Log-probs of the stochastic steps recorded so far, fp32 [B, S] (S may be 0).

        Raises:
            RuntimeError: nothing was recorded (off, or records went to a sink).
        """
        if not self._records:
            raise RuntimeError("no recorded steps: call prepare_rollout without a sink, then run the pipeline")
        scored = [record.log_prob for record in self._records if record.log_prob is not None]
        return torch.stack(scored, 1) if scored else torch.empty(self._records[0].sample.shape[0], 0)

    @property
    def rollout_records(self) -> list[StepRecord]:
        """The steps recorded so far (empty when they go to a sink)."""
        return list(self._records or ())

    @property
    def rollout_sigmas(self) -> tuple[float, ...]:
        """The full schedule in force, T+1 exact fp32 values; known once the pipeline has called ``set_timesteps``."""
        if self._schedule is None:
            raise RuntimeError("no schedule yet: it is known once the pipeline has called set_timesteps")
        return self._schedule.sigmas

    @property
    def rollout_steps(self) -> tuple[int, ...]:
        """The absolute steps that this call of the pipeline runs."""
        if self._schedule is None:
            raise RuntimeError("no schedule yet: it is known once the pipeline has called set_timesteps")
        return self._schedule.steps

    def release_rollout_resources(self) -> None:
        """Drop all rollout state and return to the off state."""
        self._state = self._schedule = self._records = None

    def _check_supported(self) -> None:
        config = self.config  # type: ignore[attr-defined]
        if config.stochastic_sampling:
            raise RolloutArgsError(
                "stochastic_sampling", "this scheduler config draws noise of its own; set it to False"
            )
        if config.invert_sigmas:
            raise RolloutArgsError(
                "invert_sigmas", "schedules that rise from 0 to 1 are not supported; set it to False"
            )

    # `sigmas`, `mu` and `timesteps` are spelt out because pipelines look for them in this signature.
    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """As the parent's; in a rollout or replay a pinned schedule (``args.sigmas``) is used verbatim instead."""
        state = self._state
        if state is None:
            super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)  # type: ignore[misc]
            return
        if state.args.sigmas is None:
            super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)  # type: ignore[misc]
            full_sigmas, full_timesteps = self.sigmas.cpu(), self.timesteps
            validate_sigmas(tuple(full_sigmas.tolist()))
        else:
            full_sigmas = torch.tensor(state.args.sigmas, dtype=torch.float32)
            full_timesteps = (full_sigmas[:-1] * self.config.num_train_timesteps).to(device)  # type: ignore[attr-defined]
        num_steps = len(full_sigmas) - 1
        state.args.validate(num_steps)
        steps = state.steps(num_steps)
        self._schedule = _Schedule(tuple(full_sigmas.tolist()), full_sigmas, steps)
        # What the pipeline's loop sees. Sigmas stay on the CPU: nothing may read the device to decide what is next.
        rows = torch.tensor(steps)
        self.sigmas = torch.cat([full_sigmas[rows], full_sigmas[rows[-1:] + 1]])
        self.timesteps = full_timesteps[rows.to(full_timesteps.device)]
        self.num_inference_steps = len(steps)
        self._step_index, self._begin_index = None, 0

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        *args: object,
        return_dict: bool = True,
        **kwargs: object,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor]:
        """As the parent's when off; one recorded transition in a rollout or replay.

        Args:
            model_output: the velocity after guidance, [B, ...].
            timestep: the pipeline's; read by the parent only.
            sample: x_k, [B, ...].

        Returns:
            x_{k+1}, rounded to the wire dtype, carried in a dtype that holds it exactly; after the last step in
            the velocity's dtype, which the pipeline's decoder expects.
        """
        if self._state is None:
            return super().step(model_output, timestep, sample, *args, return_dict=return_dict, **kwargs)  # type: ignore[misc]
        # `generator` is the pipeline's habit and harmless: noise comes from the rollout's own source.
        changed = [name for name, value in kwargs.items() if name != "generator" and value is not None]
        if args or changed:
            raise RolloutArgsError("step", f"a rollout cannot honour {', '.join(changed) or 'positional options'}")
        next_sample = self.flow_sde_sampling(model_output, sample)
        return FlowMatchEulerDiscreteSchedulerOutput(next_sample) if return_dict else (next_sample,)  # type: ignore[arg-type]

    def flow_sde_sampling(self, velocity: Tensor, sample: Tensor) -> Tensor:
        """Make (rollout) or score (replay) the next transition of the schedule, record it, and return x_{k+1}."""
        state, schedule = self._state, self._schedule
        if state is None or schedule is None:
            raise RuntimeError("not in a rollout: call prepare_rollout, then run the pipeline")
        if schedule.position == len(schedule.steps):
            raise RuntimeError("every step of the schedule has been made: call prepare_rollout again for another run")
        k = schedule.steps[schedule.position]
        if isinstance(state, _Replay) and schedule.position == 0:
            stored = self._stored(state, k, sample)
            if not torch.equal(stored, sample.to(stored.dtype)):
                raise RolloutArgsError(
                    "latents", f"the pipeline does not start from x_{k}; use clone_pipeline(start_latents=...)"
                )
        schedule.position += 1
        self._step_index = schedule.position
        args = state.args
        wire = args.latents_dtype or sample.dtype
        carrier = torch.promote_types(sample.dtype, wire)
        # Already so, except for an x_0 that a pipeline outside `clone_pipeline` drew in another dtype.
        sample = sample.to(wire).to(carrier)
        noise_std = args.noise_std(schedule.sigmas, k)
        if noise_std > 0:
            assert args.noise_level is not None  # validate() saw to it
            sigma, sigma_next = schedule.sigmas[k : k + 2]
            drift, _ = drift_and_std(
                args.dynamics, sample, velocity, sigma, sigma_next, schedule.sigmas[1], args.noise_level
            )
        else:
            # The parent's expression, promotions included, so that `ode` is the plain pipeline bit for bit.
            dt = schedule.sigmas_fp32[k + 1] - schedule.sigmas_fp32[k]
            drift = dt * velocity.to(torch.promote_types(velocity.dtype, carrier))
        mean = sample.float() + drift
        if isinstance(state, _Replay):
            noise, next_sample = None, self._stored(state, k + 1, sample)
        else:
            noise = self._draw(state, schedule.sigmas, k, sample) if noise_std > 0 else None
            next_sample = (mean if noise is None else mean + noise_std * noise).to(wire)
        score = None
        if noise_std > 0:
            error = next_sample.float() - sample.float() - drift
            score = log_prob_of_error(error, noise_std, args.resolved_log_prob_kind or "")
        keep_mean = isinstance(state, _Replay) or "mean" in args.debug
        state.sink(
            StepRecord(
                step_index=k,
                sigma=schedule.sigmas[k],
                sigma_next=schedule.sigmas[k + 1],
                noise_std=noise_std,
                # Copies on both sides: some pipelines write into their latents while a record is still on its way.
                sample=sample.to(wire, copy=True),
                next_sample=next_sample,
                log_prob=score,
                mean=mean if keep_mean else None,
                noise=noise if "noise" in args.debug else None,
                velocity=velocity if "velocity" in args.debug else None,
            )
        )
        if schedule.position == len(schedule.steps):
            return next_sample.to(velocity.dtype, copy=True)
        if isinstance(state, _Replay):
            # The next replayed step need not be k + 1: continue from its own stored latents.
            next_sample = self._stored(state, schedule.steps[schedule.position], sample)
        return next_sample.to(carrier, copy=True)

    @staticmethod
    def _stored(state: _Replay, k: int, sample: Tensor) -> Tensor:
        latents = state.latents[k]
        if latents.shape != sample.shape:
            raise RolloutArgsError(
                "latents", f"x_{k} has shape {list(latents.shape)}; this pipeline call needs {list(sample.shape)}"
            )
        return latents.to(sample.device)

    @staticmethod
    def _draw(state: _Rollout, sigmas: tuple[float, ...], k: int, sample: Tensor) -> Tensor:
        if not state.fast_forwarded:
            earlier = sum(step < state.start_step for step in state.args.stochastic_steps(sigmas))
            state.noise.fast_forward(earlier, sample)
            state.fast_forwarded = True
        return state.noise.draw(k, sample)


class RolloutFlowMatchEulerDiscreteScheduler(SchedulerRLMixin, FlowMatchEulerDiscreteScheduler):
    """diffusers' flow-matching Euler scheduler with the rollout and replay states."""
