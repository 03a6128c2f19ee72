"""Which steps of a rollout are stochastic: sorted step indices, to pass as ``stochastic_step_indices``.

Draw a window once for a whole group of samples or a whole iteration: advantages compare samples, so those of one
group must explore the same steps. The random ones follow from their seed by :func:`.seeds.derive_seed`, alike on every
machine.
"""

from __future__ import annotations

from .seeds import derive_seed


def fixed_window(start: int, size: int, num_steps: int) -> tuple[int, ...]:
    """The ``size`` steps from ``start`` on.

    Args:
        start: first stochastic step, in [0, num_steps - size].
        size: number of steps, in [1, num_steps].
        num_steps: steps of the rollout.

    Raises:
        ValueError: an argument out of range.
    """
    _check("size", size, 1, num_steps)
    _check("start", start, 0, num_steps - size)
    return tuple(range(start, start + size))


def random_window(num_candidates: int, size: int, seed: int) -> tuple[int, ...]:
    """A run of ``size`` steps, uniform among those inside the first ``num_candidates`` steps.

    The window of Flow-GRPO-Fast (the code of arXiv 2505.05470), which trains on one or two early steps drawn anew for
    each batch; its own candidates are the first half of the steps. Also the random strategy of MixGRPO's code
    (arXiv 2507.21802), which draws where its window starts. The first step of the window is
    ``derive_seed(seed, "random_window") mod (num_candidates - size + 1)``.

    Args:
        num_candidates: how many steps, from step 0 on, are candidates; 1 or more, at most the rollout's steps.
        size: number of steps, in [1, num_candidates].
        seed: any integer, for example ``derive_seed(base_seed, "window", iteration)``.

    Raises:
        ValueError: an argument out of range.
    """
    _check("size", size, 1, num_candidates)
    start = derive_seed(seed, "random_window") % (num_candidates - size + 1)
    return tuple(range(start, start + size))


def random_steps(num_candidates: int, size: int, seed: int) -> tuple[int, ...]:
    """``size`` distinct steps, uniform among the first ``num_candidates`` ones, not necessarily adjacent.

    The choice of timesteps of DanceGRPO (arXiv 2505.07818), where every step is stochastic and these are trained
    on. The steps are the ``size`` candidates k with the lowest ``derive_seed(seed, "random_steps", k)``.

    Args:
        num_candidates: how many steps, from step 0 on, are candidates; 1 or more, at most the rollout's steps.
        size: number of steps, in [1, num_candidates].
        seed: any integer.

    Raises:
        ValueError: an argument out of range.
    """
    _check("size", size, 1, num_candidates)
    by_hash = sorted(range(num_candidates), key=lambda k: derive_seed(seed, "random_steps", k))
    return tuple(sorted(by_hash[:size]))


def sliding_window(
    iteration: int, num_steps: int, size: int, stride: int = 1, iterations_per_move: int = 1
) -> tuple[int, ...]:
    """The window of one training iteration, which moves from the noisy end to the clean end and starts over.

    The progressive strategy of MixGRPO (arXiv 2507.21802; its paper uses size 4, stride 1 and 25 iterations per move).
    Window m starts at step ``m * stride``. Unlike the reference code, which lets the last windows run out short, every
    window here has ``size`` steps: the last move is shortened to end at the last step.

    Args:
        iteration: training iteration, from 0.
        num_steps: how many steps, from step 0 on, the window covers; at most the rollout's steps.
        size: number of steps in a window, in [1, num_steps].
        stride: steps per move, 1 or more; more than ``size`` leaves gaps that are never trained.
        iterations_per_move: iterations for which a window stays in place, 1 or more.

    Raises:
        ValueError: an argument out of range.
    """
    _check("iteration", iteration, 0)
    _check("size", size, 1, num_steps)
    _check("stride", stride, 1)
    _check("iterations_per_move", iterations_per_move, 1)
    last = num_steps - size
    num_windows = 1 + -(-last // stride)
    return fixed_window(min(iteration // iterations_per_move % num_windows * stride, last), size, num_steps)


def _check(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    if highest is not None and highest < lowest:
        raise ValueError(f"{name}: {value} does not fit, as there are no steps; pass at least one step")
    if value < lowest or (highest is not None and value > highest):
        wanted = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise ValueError(f"{name}: {value} is out of range; pass {wanted}")
