"""`rollout train`."""

from __future__ import annotations

import sys

from ..errors import RolloutError
from .config import TrainConfigError, parse_config


def main(argv: list[str]) -> int:
    """Train a LoRA on rollouts of a running server; returns the exit code."""
    try:
        config = parse_config(argv)
        from .trainer import train  # after --help and bad flags, which need no PEFT

        result = train(config)
    except RolloutError as error:
        print(f"rollout train: {error}", file=sys.stderr)
        return 2 if isinstance(error, TrainConfigError) else 1
    except KeyboardInterrupt:
        print("rollout train: interrupted; --resume continues from the newest checkpoint", file=sys.stderr)
        return 130
    if result.evaluations:
        first, last = result.evaluations[0], result.evaluations[-1]
        print(f"reward {first.reward:.4f} -> {last.reward:.4f} after {last.iteration} iterations", end="")
        if first.held_out_reward is not None and last.held_out_reward is not None:
            print(f", on held-out prompts {first.held_out_reward:.4f} -> {last.held_out_reward:.4f}", end="")
        print()
    print(f"policy version {result.version}; adapter and metrics in {result.output}")
    return 0
