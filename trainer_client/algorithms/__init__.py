"""What the algorithms need around a rollout: seeds, stochastic windows, advantages and losses, as pure functions.

One training iteration of Flow-GRPO: choose the ``stochastic_step_indices`` (:mod:`.windows`) and the seeds
(:mod:`.seeds`), generate, score the media, turn the rewards into advantages (:mod:`.advantages`), replay, and descend
the loss of each replayed step (:mod:`.losses`).
"""

from .advantages import group_advantages
from .losses import LossTerms, flow_grpo_loss, gaussian_kl, guard_normalise, guard_step_weights
from .seeds import derive_seed
from .windows import fixed_window, random_steps, random_window, sliding_window

__all__ = [
    "LossTerms",
    "derive_seed",
    "fixed_window",
    "flow_grpo_loss",
    "gaussian_kl",
    "group_advantages",
    "guard_normalise",
    "guard_step_weights",
    "random_steps",
    "random_window",
    "sliding_window",
]
