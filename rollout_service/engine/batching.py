"""Merging denoiser calls of different sessions into one forward, and splitting the result."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from rollout_service.models.merge_table import MergeRule
from rollout_service.tensors import tensor_bytes


@dataclass
class DenoiserCall:
    """A parked call of a denoiser: what a session's pipeline wants computed."""

    component: str
    module: nn.Module
    arguments: dict[str, Any]
    shared_keys: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    """Content keys of shared tensors, kept by the session from step to step: they are the same objects, so their
    values are read off the device once."""

    @property
    def rows(self) -> int:
        """Rows of the batch axis: of the latents, or of the first argument that has any."""
        latents = self.arguments.get("hidden_states")
        for value in (latents, *self.arguments.values()):
            if isinstance(value, (list, Tensor)) and len(value):
                return len(value)
        return 1

    def signature(self, rule: MergeRule) -> Hashable | None:
        """Calls with equal signatures can share a forward; None if this call can share with none."""
        if self.arguments.get("return_dict", True):
            return None
        parts: list[Hashable] = [self.component, id(self.module)]
        for name in sorted(self.arguments):
            part = self._part(name, self.arguments[name], rule)
            if part is None:
                return None
            parts.append((name, part))
        return tuple(parts)

    def _part(self, name: str, value: Any, rule: MergeRule) -> Hashable | None:
        if isinstance(value, Tensor):
            if name in rule.shared:
                return ("shared", value.dtype, tuple(value.shape), self._shared_key(name, value))
            if name in rule.batched and value.ndim and value.shape[0] == self.rows:
                return ("batched", value.dtype, tuple(value.shape[1:]), value.device)
            return None
        return ("value", repr(value)) if is_plain(value) else None

    def _shared_key(self, name: str, value: Tensor) -> int:
        known = self.shared_keys.get(name)
        if known is None or known[0] is not value:
            known = (value, xxhash.xxh64_intdigest(tensor_bytes(value.cpu())))
            self.shared_keys[name] = known
        return known[1]


def is_plain(value: Any) -> bool:
    """Whether equal ``repr`` means equal value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass
class ForwardCounts:
    """How many forwards were made of how many calls."""

    pipeline_calls: int = 0
    """Calls that pipelines made: forwards without merging."""
    forwards: int = 0
    rows: int = 0
    """Rows of all forwards, padding excluded."""


def run_calls(
    calls: Sequence[DenoiserCall], rule: MergeRule | None, max_rows: int, pad: bool, counts: ForwardCounts
) -> list[Any]:
    """Run calls that have one signature and return their outputs, in order.

    Args:
        calls: at least one; more than one only if their signatures are equal.
        rule: of their class; None runs the (one) call as it is.
        max_rows: the most rows of one forward; more are split.
        pad: give every forward exactly ``max_rows`` rows, padded with copies of its first row, so that the result of
            a row does not depend on what it is batched with.
        counts: is added to.
    """
    outputs, forwards = _run(calls, rule, max_rows, pad)
    counts.pipeline_calls += len(calls)
    counts.rows += sum(call.rows for call in calls)
    counts.forwards += forwards
    return outputs


def _run(calls: Sequence[DenoiserCall], rule: MergeRule | None, max_rows: int, pad: bool) -> tuple[list[Any], int]:
    total = sum(call.rows for call in calls)
    first = calls[0]
    # One call that fits goes through untouched: bit-identical to the plain pipeline.
    if rule is None or (len(calls) == 1 and total <= max_rows and not (pad and total < max_rows)):
        return [first.module(**first.arguments)], 1
    merged = {
        name: torch.cat([call.arguments[name] for call in calls]) if _is_batched(name, value, rule) else value
        for name, value in first.arguments.items()
    }
    chunks: list[list[Tensor]] = []
    for start in range(0, total, max_rows):
        size = min(max_rows, total - start)
        padding = max_rows - size if pad else 0
        chunk = {
            name: _rows(value, start, size, padding) if _is_batched(name, value, rule) else value
            for name, value in merged.items()
        }
        chunks.append([part[:size] for part in first.module(**chunk)])
    outputs = [torch.cat(parts) for parts in zip(*chunks, strict=True)] if len(chunks) > 1 else chunks[0]
    sizes = [call.rows for call in calls]
    return list(zip(*(output.split(sizes) for output in outputs), strict=True)), len(chunks)


def _is_batched(name: str, value: Any, rule: MergeRule) -> bool:
    return name in rule.batched and isinstance(value, Tensor)


def _rows(value: Tensor, start: int, size: int, padding: int) -> Tensor:
    rows = value[start : start + size]
    return torch.cat([rows, rows[:1].expand(padding, *rows.shape[1:])]) if padding else rows
