"""Transitions with exact log-probs over unmodified diffusers pipelines; usable without the service."""

from .args import RolloutArgs, RolloutArgsError, as_float32
from .dynamics import DYNAMICS, LOG_PROB_KINDS, log_prob, transition
from .mixin import RolloutFlowMatchEulerDiscreteScheduler, SchedulerRLMixin, StepRecord
from .noise import NoiseSource, initial_generator_seed, step_generator_seed
from .pipeline import clone_pipeline, rollout_scheduler

__all__ = [
    "DYNAMICS",
    "LOG_PROB_KINDS",
    "NoiseSource",
    "RolloutArgs",
    "RolloutArgsError",
    "RolloutFlowMatchEulerDiscreteScheduler",
    "SchedulerRLMixin",
    "StepRecord",
    "as_float32",
    "clone_pipeline",
    "initial_generator_seed",
    "log_prob",
    "rollout_scheduler",
    "step_generator_seed",
    "transition",
]
