"""Checkpoints of a run: PEFT adapter, optimizer state and run state; no pickle, and never half a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import RolloutError
from .lora import LoraPolicy

ADAPTER_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
_NAME = "iteration-{:06d}"


@dataclass(frozen=True)
class RunState:
    """Where a run is, besides its weights. All randomness follows from the seed, so this is all."""

    iteration: int
    """Iterations done; the next one has this index."""
    version: int
    """Policy version of the adapter; 0 before the first push."""
    rollout_version: int
    """Policy version that the next rollout is made with: older by one with a staleness of 1."""
    sha256: str = ""
    """Of the file of ``version``, hexadecimal."""
    versions: tuple[int, ...] = ()
    """Policy versions of this run that are on the server."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings, JSON-ready."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of the last iteration."""


def save_checkpoint(
    directory: Path, policy: LoraPolicy, optimizer: torch.optim.Optimizer, state: RunState, keep: int
) -> Path:
    """Write ``directory/iteration-000012``: to another name first, then renamed. Only the newest ``keep`` stay."""
    target = directory / _NAME.format(state.iteration)
    partial = directory / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(policy.state(), partial / ADAPTER_FILE)
    policy.config.save_pretrained(str(partial))
    save_file(optimizer_tensors(optimizer, policy.parameters()), partial / OPTIMIZER_FILE)
    (partial / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(directory.glob(_NAME.format(0).replace("000000", "*")), key=lambda path: int(path.name[10:]))


def load_state(checkpoint: Path) -> RunState:
    """The run state of a checkpoint.

    Raises:
        RolloutError: it is not one.
    """
    try:
        fields = json.loads((checkpoint / STATE_FILE).read_text())
        return RunState(**fields | {"versions": tuple(fields["versions"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RolloutError(f"{checkpoint}: not a checkpoint of a run: {error}") from error


def load_weights(checkpoint: Path, policy: LoraPolicy, optimizer: torch.optim.Optimizer) -> None:
    """Set the adapter and the optimizer to those of a checkpoint, bit for bit.

    Raises:
        RolloutError: they do not fit.
    """
    try:
        policy.load_state(load_file(checkpoint / ADAPTER_FILE))
        load_optimizer_tensors(optimizer, policy.parameters(), load_file(checkpoint / OPTIMIZER_FILE))
    except (OSError, ValueError, KeyError) as error:
        raise RolloutError(f"{checkpoint}: cannot be loaded: {error}") from error
    except Exception as error:  # safetensors raises its own kind
        raise RolloutError(f"{checkpoint}: not readable as safetensors: {error}") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state (moments and step counts) as ``state.parameter``; empty before the first step."""
    return {
        f"{kind}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for name, parameter in parameters.items()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Set the state that :func:`optimizer_tensors` returned. Hyperparameters stay those of the optimizer.

    Raises:
        ValueError: a parameter of another name or shape.
    """
    states: dict[int, dict[str, Tensor]] = {}
    order = {name: index for index, name in enumerate(parameters)}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if name not in order or tensor.numel() not in (1, parameters[name].numel()):
            raise ValueError(f"{OPTIMIZER_FILE}: {key} is of no parameter of this adapter")
        states.setdefault(order[name], {})[kind] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
