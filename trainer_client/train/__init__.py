"""`rollout train`: Flow-GRPO over RPC for a LoRA on any pipeline that the service can serve.

Example::

    from trainer_client.train import TrainConfig, train

    result = train(TrainConfig(target="127.0.0.1:50051", output="train-out", iterations=40))
    result.evaluations[-1].reward
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import TrainConfig, TrainConfigError

if TYPE_CHECKING:
    from .trainer import TrainResult, train

__all__ = ["TrainConfig", "TrainConfigError", "TrainResult", "train"]


def __getattr__(name: str) -> Any:
    # Loaded when used: PEFT takes seconds, and `rollout train --help` does not need it.
    if name in ("TrainResult", "train"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
