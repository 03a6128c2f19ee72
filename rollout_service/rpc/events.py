"""From the engine's frames to the events of a stream: gapless sequence, bounded size, digests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import tensor_pb2
from google.protobuf import duration_pb2

from rollout_service.engine.channel import Frame, RawTensor
from rollout_service.engine.spec import RolloutSpec
from rollout_service.tensors import DATA_TYPES

_ROLES = {
    "latents": pb.TENSOR_ROLE_LATENTS,
    "noise": pb.TENSOR_ROLE_NOISE,
    "mean": pb.TENSOR_ROLE_MEAN,
    "velocity": pb.TENSOR_ROLE_VELOCITY,
}
_REASONS = {"NON_FINITE": pb.ERROR_REASON_NON_FINITE, "PIPELINE_ERROR": pb.ERROR_REASON_PIPELINE_ERROR}
_MEDIA = {"raw": pb.MEDIA_FORMAT_RAW, "png": pb.MEDIA_FORMAT_PNG}

# Generous bounds of what surrounds the data, so that no event has to be measured: field numbers, lengths, indices.
_EVENT_OVERHEAD = 48
_STEP_OVERHEAD = 48
_TENSOR_OVERHEAD = 96
#: A part smaller than this is not worth a message of its own.
_SMALLEST_PART = 1024


class EventWriter:
    """Turns the frames of one rollout into its events.

    Args:
        spec: the rollout.
        max_event_bytes: upper bound of one serialised event.
    """

    def __init__(self, spec: RolloutSpec, max_event_bytes: int) -> None:
        self._spec = spec
        self._budget = max_event_bytes - _EVENT_OVERHEAD
        self._sequence = 0
        self._digests = [xxhash.xxh64() for _ in spec.samples]
        self._steps = [0] * len(spec.samples)
        self._finished = 0
        self._failed = 0
        self._tensor_bytes = 0

    def event(self, **event: Any) -> pb.GenerateRolloutResponse:
        """The next event of the stream."""
        response = pb.GenerateRolloutResponse(sequence=self._sequence, **event)
        self._sequence += 1
        return response

    def events(self, frame: Frame) -> Iterator[pb.GenerateRolloutResponse]:
        """The events of one frame (all kinds but ``finished``, which needs the clock: :meth:`finished`)."""
        match frame.kind:
            case "started":
                yield self.event(
                    started=pb.RolloutStarted(
                        policy_version=frame.fields["policy_version"],
                        sigmas=frame.fields["sigmas"],
                        stochastic_step_indices=frame.fields["stochastic_steps"],
                        latents_indices=frame.fields["latents_indices"],
                    )
                )
            case "conditioning":
                for conditioning in self._conditioning(frame):
                    yield self.event(conditioning=conditioning)
            case "steps":
                for step in self._step_events(frame):
                    yield self.event(step=step)
            case "sample_finished":
                for finished in self._sample_finished(frame):
                    yield self.event(sample_finished=finished)

    def finished(self, queue_seconds: float, run_seconds: float) -> pb.GenerateRolloutResponse:
        """The last event."""
        total = xxhash.xxh64(b"".join(d.intdigest().to_bytes(8, "little") for d in self._digests))
        return self.event(
            finished=pb.RolloutFinished(
                num_finished=self._finished,
                num_failed=self._failed,
                num_steps=sum(self._steps),
                tensor_bytes=self._tensor_bytes,
                digest=total.intdigest(),
                queue_time=_duration(queue_seconds),
                run_time=_duration(run_seconds),
            )
        )

    def _step_events(self, frame: Frame) -> Iterator[pb.StepEvent]:
        event, used = pb.StepEvent(), 0
        fields = frame.fields
        for row, sample in enumerate(fields["samples"]):
            for (role, index), batch in zip(fields["tensors"], frame.tensors, strict=True):
                tensor = batch.row(row)
                self._digests[sample].update(tensor.data)
                self._tensor_bytes += len(tensor.data)
                for part in self._parts(tensor, used=used):
                    size = len(part.data) + _TENSOR_OVERHEAD
                    if used and used + size > self._budget:
                        yield event
                        event, used = pb.StepEvent(), 0
                    event.tensors.add(sample_index=sample, role=_ROLES[role], index=index, tensor=part)
                    used += size
            if used + _STEP_OVERHEAD > self._budget:
                yield event
                event, used = pb.StepEvent(), 0
            step = event.steps.add(
                sample_index=sample,
                step_index=fields["step_index"],
                noise_std=fields["noise_std"],
                policy_version=fields["policy_version"],
            )
            if fields["log_prob"] is not None:
                step.log_prob = fields["log_prob"][row]
                self._digests[sample].update(np.float32(fields["log_prob"][row]).tobytes())
            self._steps[sample] += 1
            used += _STEP_OVERHEAD
        if used:
            yield event

    def _parts(self, tensor: RawTensor, *, used: int = 0, reserve: int = 0) -> Iterator[tensor_pb2.Tensor]:
        """The tensor whole if it fits one event, else in parts; the first fills what is left of the event in hand.

        ``reserve`` is what each event needs besides the tensor.
        """
        whole = self._budget - _TENSOR_OVERHEAD - reserve
        dtype, shape, size = DATA_TYPES[tensor.dtype], tensor.shape, len(tensor.data)
        room = whole - used
        if size <= whole or room < _SMALLEST_PART:
            room = whole
        offset = 0
        while True:
            end = min(offset + room // 8 * 8, size)  # whole elements of every dtype
            yield tensor_pb2.Tensor(dtype=dtype, shape=shape, offset=offset, data=bytes(tensor.data[offset:end]))
            offset, room = end, whole
            if offset >= size:
                return

    def _conditioning(self, frame: Frame) -> Iterator[pb.Conditioning]:
        tensors = iter(frame.tensors)
        entries = frame.fields["entries"]
        if not entries:
            yield pb.Conditioning(prompt_index=frame.fields["prompt_index"], last=True)
        for position, entry in enumerate(entries):
            final = position == len(entries) - 1
            head = {name: entry[name] for name in ("call_index", "component", "name", "rows_per_sample", "batched")}
            head["prompt_index"] = frame.fields["prompt_index"]
            if not entry["is_tensor"]:
                yield pb.Conditioning(**head, json_value=json.dumps(entry["value"]), last=final)
                continue
            parts = list(self._parts(next(tensors), reserve=len(entry["name"]) + len(entry["component"]) + 32))
            for number, part in enumerate(parts):
                yield pb.Conditioning(**head, tensor=part, last=final and number == len(parts) - 1)

    def _sample_finished(self, frame: Frame) -> Iterator[pb.SampleFinished]:
        sample, error = frame.fields["sample"], frame.fields["error"]
        end: dict[str, Any] = {
            "sample_index": sample,
            "num_steps": self._steps[sample],
            "digest": self._digests[sample].intdigest(),
            "last": True,
        }
        if error is not None:
            self._failed += 1
            reason, message, step = error
            message = message.encode()[: self._budget - 256].decode(errors="ignore")
            yield pb.SampleFinished(
                **end, error=pb.SampleError(reason=_REASONS[reason], message=message, step_index=step)
            )
            return
        self._finished += 1
        if not frame.tensors:
            yield pb.SampleFinished(**end)
            return
        media_format = _MEDIA[self._spec.media]
        parts = [(f, part) for f, tensor in enumerate(frame.tensors) for part in self._parts(tensor)]
        for number, (frame_index, part) in enumerate(parts):
            last = number == len(parts) - 1
            head = end if last else {"sample_index": sample}
            yield pb.SampleFinished(**head, frame_index=frame_index, media_format=media_format, media=part)


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration
