"""A memo around a pipeline's ``encode_prompt``, bounded in bytes; works for any family."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class PromptCache:
    """Least-recently-used results of ``encode_prompt``, keyed by its arguments.

    Args:
        max_bytes: the most bytes of tensors kept; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._results: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.nbytes = 0
        self.hits = 0
        self.misses = 0

    def wrap(self, encode_prompt: Callable[..., Any]) -> Callable[..., Any]:
        """``encode_prompt`` with the memo; calls whose arguments cannot be a key go straight through."""
        bind = inspect.signature(encode_prompt).bind

        def cached(*args: Any, **kwargs: Any) -> Any:
            bound = bind(*args, **kwargs)
            try:
                key = tuple((name, _key(value)) for name, value in bound.arguments.items() if value is not None)
            except TypeError:
                return encode_prompt(*args, **kwargs)
            if key in self._results:
                self.hits += 1
                self._results.move_to_end(key)
                return self._results[key][0]
            self.misses += 1
            result = encode_prompt(*args, **kwargs)
            self._keep(key, result)
            return result

        return cached

    def _keep(self, key: Hashable, result: Any) -> None:
        size = sum(t.numel() * t.element_size() for t in _tensors(result))
        if not size or size > self._max_bytes:
            return
        self._results[key] = (result, size)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            _, (_, oldest) = self._results.popitem(last=False)
            self.nbytes -= oldest


def _key(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if value is None or isinstance(value, (bool, int, float, str, torch.device, torch.dtype)):
        return (type(value).__name__, value)
    raise TypeError(f"{type(value).__name__} is no key")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
