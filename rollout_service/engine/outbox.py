"""What leaves the engine: one thread that takes finished steps off the device's hands and sends them.

The conductor never waits for a copy or a socket: it hands over tensors whose copies to the CPU have been started.
Here, a step later, samples that became non-finite are found and ended alone.
"""

from __future__ import annotations

import io
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from .session import CapturedConditioning
from .spec import RolloutSpec


class Send(Protocol):
    """How a frame is sent."""

    def __call__(self, kind: str, fields: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send it."""


class HostCopy:
    """A tensor on its way to the CPU; ``tensor()`` waits for it. CPU tensors are handed through."""

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cuda":
            self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._tensor.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            # The stream of the copy: the current stream is the current device's, which may be another.
            self._event.record(torch.cuda.current_stream(source.device))
        else:
            self._tensor = source.cpu()

    def tensor(self) -> Tensor:
        """The CPU tensor."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


@dataclass
class RolloutProgress:
    """What the outbox knows of a rollout; only its thread touches it after the start."""

    spec: RolloutSpec
    sessions_left: int
    failed: set[int] = field(default_factory=set)
    started: bool = False


@dataclass(frozen=True)
class StepItem:
    """One step of one session."""

    rollout: RolloutProgress
    sample_indices: tuple[int, ...]
    account_bytes: int
    """What the reader's acknowledgement gives back to the stream's buffer."""
    step_index: int
    noise_std: float
    policy_version: int
    log_prob: HostCopy | None
    finite: HostCopy
    tensors: tuple[tuple[str, int, HostCopy], ...]
    """(role, absolute index, [K, ...])."""


@dataclass(frozen=True)
class StartedItem:
    """The schedule of a rollout is known."""

    rollout: RolloutProgress
    policy_version: int
    sigmas: tuple[float, ...]


@dataclass(frozen=True)
class ConditioningItem:
    """Conditioning of one prompt."""

    rollout: RolloutProgress
    prompt_index: int
    captured: tuple[CapturedConditioning, ...]
    account_bytes: int


@dataclass(frozen=True)
class SessionEndItem:
    """A session ended: with an error, cancelled, or with media if asked for."""

    rollout: RolloutProgress
    sample_indices: tuple[int, ...]
    next_step: int
    error: str | None = None
    media: HostCopy | None = None
    media_finite: HostCopy | None = None
    """bool [K]: whether all of a sample's decoded values are finite."""
    account_bytes: int = 0
    cancelled: bool = False


Item = StepItem | StartedItem | ConditioningItem | SessionEndItem


class Outbox:
    """Sends items in order on its own thread.

    Args:
        send: sends one frame; called on the outbox's thread only.
        on_sample_failed: told (rollout_id, sample_index) when a sample became non-finite.
    """

    def __init__(self, send: Send, on_sample_failed: Callable[[str, int], None]) -> None:
        self._send, self._on_sample_failed = send, on_sample_failed
        self._items: queue.SimpleQueue[Item | tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Send an item after those before it."""
        self._items.put(item)

    def put_frame(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a frame without tensors after the items before it."""
        self._items.put((kind, fields))

    def close(self) -> None:
        """Send what is left and end the thread."""
        self._items.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            StepItem: self._step,
            StartedItem: self._started,
            ConditioningItem: self._conditioning,
            SessionEndItem: self._session_end,
        }
        while (item := self._items.get()) is not None:
            try:
                if isinstance(item, tuple):
                    self._send(*item)
                else:
                    handlers[type(item)](item)
            except OSError:
                return  # the frontend is gone; the process is about to end
            except Exception:
                # Nobody would send what follows: end the process, which the frontend notices, rather than hang.
                traceback.print_exc()
                os._exit(1)

    def _started(self, item: StartedItem) -> None:
        if item.rollout.started:
            return
        item.rollout.started = True
        spec = item.rollout.spec
        self._send(
            "started",
            {
                "rollout_id": spec.rollout_id,
                "policy_version": item.policy_version,
                "sigmas": item.sigmas,
                "stochastic_steps": spec.args.stochastic_steps(item.sigmas),
                "latents_indices": spec.wanted_latents(item.sigmas),
            },
        )

    def _conditioning(self, item: ConditioningItem) -> None:
        entries = []
        tensors = []
        for entry in item.captured:
            is_tensor = isinstance(entry.value, Tensor)
            if is_tensor:
                tensors.append(entry.value.cpu())
            entries.append(
                {
                    "call_index": entry.call_index,
                    "component": entry.component,
                    "name": entry.name,
                    "rows_per_sample": entry.rows_per_sample,
                    "batched": entry.batched,
                    "value": None if is_tensor else entry.value,
                    "is_tensor": is_tensor,
                }
            )
        self._send(
            "conditioning",
            {
                "rollout_id": item.rollout.spec.rollout_id,
                "prompt_index": item.prompt_index,
                "entries": entries,
                "account_bytes": item.account_bytes,
            },
            tensors,
        )

    def _step(self, item: StepItem) -> None:
        rollout = item.rollout
        finite = item.finite.tensor().tolist()
        log_prob = item.log_prob.tensor() if item.log_prob is not None else None
        for sample, ok in zip(item.sample_indices, finite, strict=True):
            if not ok and sample not in rollout.failed:
                rollout.failed.add(sample)
                message = f"latents became NaN or infinite in step {item.step_index}"
                self._finish_sample(rollout, sample, error=("NON_FINITE", message, item.step_index))
                self._on_sample_failed(rollout.spec.rollout_id, sample)
        rows = [row for row, sample in enumerate(item.sample_indices) if sample not in rollout.failed]
        every = len(rows) == len(item.sample_indices)
        tensors = [copy.tensor() if every else copy.tensor()[rows] for _, _, copy in item.tensors]
        # Sent even where no row is left, so that the conductor's account of bytes under way is settled.
        self._send(
            "steps",
            {
                "rollout_id": rollout.spec.rollout_id,
                "samples": [item.sample_indices[row] for row in rows],
                "step_index": item.step_index,
                "policy_version": item.policy_version,
                "noise_std": item.noise_std,
                "log_prob": log_prob[rows].tolist() if log_prob is not None else None,
                "tensors": [(role, index) for role, index, _ in item.tensors],
                "account_bytes": item.account_bytes,
            },
            tensors,
        )

    def _session_end(self, item: SessionEndItem) -> None:
        rollout, count = item.rollout, len(item.sample_indices)
        media = item.media.tensor() if item.media is not None else None
        finite = item.media_finite.tensor().tolist() if item.media_finite is not None else [True] * count
        share, unsent = item.account_bytes // count, item.account_bytes
        for row, sample in enumerate(item.sample_indices):
            if item.cancelled or sample in rollout.failed:
                continue
            if item.error is not None:
                self._finish_sample(rollout, sample, error=("PIPELINE_ERROR", item.error, item.next_step))
            elif not finite[row]:
                message = "its decoded media have NaN or infinite values"
                self._finish_sample(rollout, sample, error=("NON_FINITE", message, item.next_step))
            else:
                own = media[row] if media is not None else None
                self._finish_sample(rollout, sample, media=own, account_bytes=share)
                unsent -= share
        if unsent and not item.cancelled:
            # Media that were not sent: give their bytes back all the same, or the stream's buffer stays full.
            self._send("unsent", {"rollout_id": rollout.spec.rollout_id, "account_bytes": unsent})
        rollout.sessions_left -= 1
        if rollout.sessions_left == 0:
            self._send("finished", {"rollout_id": rollout.spec.rollout_id})

    def _finish_sample(
        self,
        rollout: RolloutProgress,
        sample: int,
        error: tuple[str, str, int] | None = None,
        media: Tensor | None = None,
        account_bytes: int = 0,
    ) -> None:
        tensors: list[Tensor] = []
        if media is not None and rollout.spec.media == "raw":
            tensors = [media]
        elif media is not None:
            frames = media if media.ndim == 4 else media[None]
            tensors = [torch.frombuffer(bytearray(encode_png(frame)), dtype=torch.uint8) for frame in frames]
        self._send(
            "sample_finished",
            {
                "rollout_id": rollout.spec.rollout_id,
                "sample": sample,
                "error": error,
                "account_bytes": account_bytes,
            },
            tensors,
        )


def encode_png(image: Tensor) -> bytes:
    """A PNG file of a uint8 image [H, W, 3]."""
    buffer = io.BytesIO()
    Image.fromarray(image.numpy()).save(buffer, "png")
    return buffer.getvalue()
