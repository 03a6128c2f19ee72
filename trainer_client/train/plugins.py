"""Finding rewards, prompts and models by name, so that the trainer imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .config import TrainConfigError

#: (images, prompts) -> N rewards. Images are uint8 [N, height, width, 3], or [N, frames, height, width, 3] of video.
Reward = Callable[[Tensor, list[str]], Sequence[float] | Tensor]


@dataclass(frozen=True)
class PromptSets:
    """Prompts to train on, and others that only measure what training generalises to."""

    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()


def load_reward(name: str) -> Reward:
    """The reward registered under a name in `rollout.rewards`, or at ``package.module:callable``.

    Raises:
        TrainConfigError: there is none.
    """
    reward: Any = _load("reward", "rollout.rewards", name)
    if not callable(reward):
        raise TrainConfigError("reward", f"{name} is a {type(reward).__name__}; pass a callable (images, prompts)")
    return cast(Reward, reward)


def load_prompts(name: str, held_out: Path | None = None) -> PromptSets:
    """Prompts from a registered callable or ``package.module:callable``, or from a text file.

    The callable returns an object or a mapping with ``train`` and, if it likes, ``held_out``.

    Raises:
        TrainConfigError: there is none, it has no prompts, or a prompt is in both sets.
    """
    if Path(name).is_file():
        sets = PromptSets(_read_lines("prompts", Path(name)))
    else:
        found = _load("prompts", "rollout.prompts", name)
        found = found() if callable(found) else found
        get = found.get if isinstance(found, Mapping) else lambda key, default: getattr(found, key, default)
        sets = PromptSets(tuple(get("train", ())), tuple(get("held_out", ())))
    if held_out is not None:
        sets = PromptSets(sets.train, _read_lines("held_out_prompts", held_out))
    if not sets.train:
        raise TrainConfigError("prompts", f"{name} has no prompts to train on")
    for field, prompts in (("prompts", sets.train), ("held_out_prompts", sets.held_out)):
        if len(set(prompts)) < len(prompts):
            twice = next(prompt for prompt in prompts if prompts.count(prompt) > 1)
            raise TrainConfigError(field, f"{twice!r} is there twice; pass each prompt once")
    if both := set(sets.train) & set(sets.held_out):
        raise TrainConfigError("held_out_prompts", f"{min(both)!r} is trained on too; pass other prompts")
    return sets


def model_source(name: str) -> str:
    """The path of a model registered in `rollout.models`; any other name as it is."""
    registered = _registered("rollout.models")
    return str(registered[name].load()) if name in registered else name


def score(reward: Reward, images: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
    """Rewards of images of one size: float64 [N].

    Raises:
        TrainConfigError: what the reward returns is not N finite numbers.
    """
    returned = reward(torch.stack(list(images)), list(prompts))
    try:
        values = torch.as_tensor(returned).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainConfigError("reward", f"returned what is not numbers ({error}); return one per image") from error
    if values.shape != (len(prompts),):
        raise TrainConfigError(
            "reward", f"returned shape {list(values.shape)} for {len(prompts)} images; return one each"
        )
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).nonzero()[0])
        raise TrainConfigError("reward", f"returned {values[bad].item()} for {prompts[bad]!r}; return finite numbers")
    return values


def _registered(group: str) -> dict[str, Any]:
    return {entry_point.name: entry_point for entry_point in entry_points(group=group)}


def _load(field: str, group: str, name: str) -> Any:
    registered = _registered(group)
    if name in registered:
        return registered[name].load()
    module, separator, attribute = name.partition(":")
    if not separator:
        known = ", ".join(sorted(registered)) or "none"
        raise TrainConfigError(field, f"{name!r} is not registered ({known}); pass package.module:callable")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainConfigError(field, f"{name}: {error}") from error
    return found


def _read_lines(field: str, path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise TrainConfigError(field, f"{path}: {error}") from error
