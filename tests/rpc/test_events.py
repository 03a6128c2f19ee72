"""The events of a stream, read as a client in any language reads them: without a line of the client library."""

from __future__ import annotations

import io
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import xxhash
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import rollout_pb2_grpc, tensor_pb2
from PIL import Image

from rollout_service.config import MAX_EVENT_BYTES, MIN_EVENT_BYTES, ServerConfig
from rollout_service.engine.channel import Frame, RawTensor
from rollout_service.rpc.errors import ServiceError
from rollout_service.rpc.events import EventWriter
from rollout_service.rpc.servicer import accepted_event
from rollout_service.tensors import tensor_bytes
from tests.rpc.support import CONFIG, IMAGE_FACTS, parse, request
from trainer_client import RolloutClient

MIB = 1 << 20
SIZES = [4096, 10_000, MIB]
ITEM_BYTES = {
    tensor_pb2.DATA_TYPE_FLOAT32: 4,
    tensor_pb2.DATA_TYPE_BFLOAT16: 2,
    tensor_pb2.DATA_TYPE_FLOAT16: 2,
    tensor_pb2.DATA_TYPE_UINT8: 1,
    tensor_pb2.DATA_TYPE_INT64: 8,
    tensor_pb2.DATA_TYPE_BOOL: 1,
}
#: Tensors of 12 KiB, media of 36 KiB and conditioning of 70 KiB: split by the smaller event sizes.
EVERYTHING = {
    "prompts": ('prompt: "one" seed_range { seed: 1 count: 2 }', 'prompt: "two" negative_prompt: "bad" samples { }'),
    "sampling": "dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: 3 stochastic_step_indices { indices: [0, 2] }",
    "pipeline": "height: 128 width: 96",
}
OUTPUT = "noise: true mean: true velocity: true conditioning: true media: MEDIA_FORMAT_{media} max_event_bytes: {size}"

Events = list[pb.GenerateRolloutResponse]


class Parts:
    """A tensor put together from parts that follow each other; strict about what the protocol says of them."""

    def __init__(self) -> None:
        self.whole: list[tuple[Any, tuple[int, tuple[int, ...], bytes]]] = []
        self._open: tuple[Any, int, tuple[int, ...], bytes] | None = None

    def add(self, key: Any, part: tensor_pb2.Tensor) -> None:
        """Append a part of the tensor ``key``."""
        shape = tuple(part.shape)
        size = math.prod(shape) * ITEM_BYTES[part.dtype]
        assert self._open is None or self._open[:3] == (key, part.dtype, shape), "another tensor before this is whole"
        data = self._open[3] if self._open else b""
        assert part.offset == len(data)
        assert part.offset % ITEM_BYTES[part.dtype] == len(part.data) % ITEM_BYTES[part.dtype] == 0
        data += part.data
        assert len(data) <= size
        self._open = (key, part.dtype, shape, data)
        if len(data) == size:
            self.whole.append((key, (part.dtype, shape, data)))
            self._open = None

    @property
    def complete(self) -> bool:
        """Whether no tensor is half there."""
        return self._open is None


@dataclass
class Rollout:
    """What a stream amounts to, however it was cut into events."""

    accepted: pb.RolloutAccepted
    started: pb.RolloutStarted
    finished: pb.RolloutFinished
    tensors: dict[tuple[int, int, int], tuple[int, tuple[int, ...], bytes]]
    """By (sample, role, index): dtype, shape, data."""
    steps: dict[tuple[int, int], pb.SampleStep]
    ends: dict[int, pb.SampleFinished]
    conditioning: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    media: dict[int, list[tuple[int, tuple[int, ...], bytes]]] = field(default_factory=lambda: defaultdict(list))


def put_together(events: Events) -> Rollout:
    """Reassemble a stream, and check the order of events that the protocol promises."""
    assert [event.sequence for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:2] == ["accepted", "started"]
    assert kinds[-1] == "finished"
    assert not {"accepted", "started", "finished"} & set(kinds[2:-1])
    rollout = Rollout(events[0].accepted, events[1].started, events[-1].finished, {}, {}, {})
    samples = rollout.accepted.samples
    tensors, conditioning, media = Parts(), Parts(), Parts()
    heads: dict[Any, pb.Conditioning] = {}
    conditioned: set[int] = set()
    for event in events[2:-1]:
        # The parts of one tensor are in consecutive events.
        assert tensors.complete or event.HasField("step")
        assert conditioning.complete or event.HasField("conditioning")
        assert media.complete or event.HasField("sample_finished")
        if event.HasField("conditioning"):
            part = event.conditioning
            assert part.prompt_index not in conditioned
            key = (part.prompt_index, part.call_index, part.component, part.name)
            heads[key] = part
            if part.json_value:
                rollout.conditioning[part.prompt_index].append((*key, part.json_value))
            elif part.name:
                conditioning.add(key, part.tensor)
            if part.last:
                assert conditioning.complete
                conditioned.add(part.prompt_index)
        for tensor in event.step.tensors:
            assert tensor.sample_index not in rollout.ends
            assert tensor.role != pb.TENSOR_ROLE_UNSPECIFIED
            tensors.add((tensor.sample_index, tensor.role, tensor.index), tensor.tensor)
        for step in event.step.steps:
            add_step(rollout, step, {key for key, _ in tensors.whole}, conditioned)
        if event.HasField("sample_finished"):
            end = event.sample_finished
            assert end.sample_index not in rollout.ends
            if end.HasField("media"):
                media.add((end.sample_index, end.frame_index, end.media_format), end.media)
            if end.last:
                assert media.complete
                rollout.ends[end.sample_index] = end
    assert set(rollout.ends) == set(range(len(samples)))
    assert len(dict(tensors.whole)) == len(tensors.whole), "a tensor came twice"
    rollout.tensors = dict(tensors.whole)
    for key, value in conditioning.whole:
        head = heads[key]
        rollout.conditioning[key[0]].append((*key, head.rows_per_sample, head.batched, value))
    for (sample, _, _), value in media.whole:
        rollout.media[sample].append(value)
    return rollout


def add_step(rollout: Rollout, step: pb.SampleStep, arrived: set[tuple[int, int, int]], conditioned: set[int]) -> None:
    """One step is complete: it is the next of its sample, and all of its tensors have arrived."""
    sample, k = step.sample_index, step.step_index
    start = rollout.accepted.samples[sample].start_step
    assert k == start + sum(key[0] == sample for key in rollout.steps)
    assert not conditioned or rollout.accepted.samples[sample].prompt_index in conditioned
    stochastic = k in rollout.started.stochastic_step_indices
    assert step.HasField("log_prob") == (step.noise_std > 0) == stochastic
    wanted = {k + 1} if k > start else {k, k + 1}
    for index in wanted & set(rollout.started.latents_indices):
        assert (sample, pb.TENSOR_ROLE_LATENTS, index) in arrived
    rollout.steps[sample, k] = step


def digest_of(rollout: Rollout, sample: int) -> int:
    """As the comment at SampleFinished.digest says."""
    digest = xxhash.xxh64()
    start = rollout.accepted.samples[sample].start_step
    for k in sorted(k for s, k in rollout.steps if s == sample):
        keys = [(pb.TENSOR_ROLE_LATENTS, k)] if k == start else []
        keys += [(pb.TENSOR_ROLE_LATENTS, k + 1), (pb.TENSOR_ROLE_NOISE, k)]
        keys += [(pb.TENSOR_ROLE_MEAN, k), (pb.TENSOR_ROLE_VELOCITY, k)]
        for role, index in keys:
            if (sample, role, index) in rollout.tensors:
                digest.update(rollout.tensors[sample, role, index][2])
        step = rollout.steps[sample, k]
        if step.HasField("log_prob"):
            digest.update(struct.pack("<f", step.log_prob))
    return digest.intdigest()


def assert_totals(rollout: Rollout) -> None:
    """Counts and digests are those of what arrived."""
    digests = []
    for sample in range(len(rollout.accepted.samples)):
        digests.append(digest_of(rollout, sample))
        assert rollout.ends[sample].digest == digests[-1]
        assert rollout.ends[sample].num_steps == sum(s == sample for s, _ in rollout.steps)
    finished = rollout.finished
    assert finished.digest == xxhash.xxh64_intdigest(struct.pack(f"<{len(digests)}Q", *digests))
    assert finished.num_steps == len(rollout.steps)
    assert finished.tensor_bytes == sum(len(data) for _, _, data in rollout.tensors.values())
    failed = sum(end.HasField("error") for end in rollout.ends.values())
    assert (finished.num_failed, finished.num_finished) == (failed, len(digests) - failed)
    assert finished.run_time.ToTimedelta().total_seconds() > 0


@pytest.fixture(scope="module")
def streams(stub: Any) -> dict[tuple[str, int], Events]:
    """The events of one rollout with everything that can come back, by media format and event size."""
    return {
        (media, size): list(
            stub.GenerateRollout(request(**EVERYTHING, output=OUTPUT.format(media=media, size=size)), timeout=60)
        )
        for media in ("RAW", "PNG")
        for size in SIZES
    }


KEYS = [(media, size) for media in ("RAW", "PNG") for size in SIZES]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_no_event_is_larger_than_asked_for(streams: dict[Any, Events], key: tuple[str, int]) -> None:
    sizes = [event.ByteSize() for event in streams[key]]
    assert max(sizes) <= key[1]
    if key[1] < 64 * 1024:
        assert max(sizes) > 0.9 * key[1], "events should be filled"


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_order_counts_and_digests(streams: dict[Any, Events], key: tuple[str, int]) -> None:
    assert_totals(put_together(streams[key]))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_everything_asked_for_arrives(streams: dict[Any, Events], key: tuple[str, int]) -> None:
    media, size = key
    rollout = put_together(streams[key])
    assert rollout.accepted.max_event_bytes == size
    assert list(rollout.started.stochastic_step_indices) == [0, 2]
    assert list(rollout.started.latents_indices) == [0, 1, 2, 3]
    assert len(rollout.started.sigmas) == 4
    roles = {
        pb.TENSOR_ROLE_LATENTS: [0, 1, 2, 3],
        pb.TENSOR_ROLE_NOISE: [0, 2],
        pb.TENSOR_ROLE_MEAN: [0, 1, 2],
        pb.TENSOR_ROLE_VELOCITY: [0, 1, 2],
    }
    expected = {(sample, role, index) for sample in range(3) for role, indices in roles.items() for index in indices}
    assert set(rollout.tensors) == expected
    assert {value[:2] for value in rollout.tensors.values()} == {(tensor_pb2.DATA_TYPE_FLOAT32, (16, 16, 12))}
    for prompt in (0, 1):
        names = {name for _, _, _, name, *_ in rollout.conditioning[prompt]}
        assert {"encoder_hidden_states", "pooled_projections"} <= names
    for sample in range(3):
        assert rollout.ends[sample].media_format == getattr(pb, f"MEDIA_FORMAT_{media}")
        ((dtype, shape, data),) = rollout.media[sample]
        assert dtype == tensor_pb2.DATA_TYPE_UINT8
        if media == "RAW":
            assert shape == (128, 96, 3)
        else:
            assert shape == (len(data),)
            assert Image.open(io.BytesIO(data)).size == (96, 128)


def test_what_arrives_does_not_depend_on_the_event_size(streams: dict[Any, Events]) -> None:
    for media in ("RAW", "PNG"):
        first, *others = (put_together(streams[media, size]) for size in SIZES)
        for other in others:
            assert other.tensors == first.tensors
            assert other.steps == first.steps
            assert other.conditioning == first.conditioning
            assert other.media == first.media
            assert other.started == first.started
            assert other.finished.digest == first.finished.digest


def test_png_and_raw_media_are_the_same_image(streams: dict[Any, Events]) -> None:
    raw, png = (put_together(streams[media, MIB]) for media in ("RAW", "PNG"))
    for sample in range(3):
        pixels = np.asarray(Image.open(io.BytesIO(png.media[sample][0][2])))
        assert pixels.tobytes() == raw.media[sample][0][2]


def test_the_noise_and_mean_give_the_latents(streams: dict[Any, Events]) -> None:
    rollout = put_together(streams["RAW", MIB])

    def values(sample: int, role: int, index: int) -> np.ndarray:
        return np.frombuffer(rollout.tensors[sample, role, index][2], dtype="<f4")

    for (sample, k), step in rollout.steps.items():
        expected = values(sample, pb.TENSOR_ROLE_MEAN, k)
        if step.noise_std > 0:
            expected = expected + np.float32(step.noise_std) * values(sample, pb.TENSOR_ROLE_NOISE, k)
        np.testing.assert_allclose(values(sample, pb.TENSOR_ROLE_LATENTS, k + 1), expected, rtol=0, atol=1e-6)


def test_small_tensors_of_several_samples_share_an_event(stub: Any) -> None:
    message = request(prompts=('prompt: "a" seed_range { count: 8 }',), output="noise: true mean: true velocity: true")
    events = list(stub.GenerateRollout(message, timeout=60))
    steps = [event.step for event in events if event.HasField("step")]
    assert [len(step.steps) for step in steps] == [8] * 4
    assert [len(step.tensors) for step in steps] == [8 * 5, 8 * 4, 8 * 4, 8 * 4]


def test_the_first_step_comes_before_the_last_is_computed(stub: Any) -> None:
    """The events of a rollout come one step after the other, not together at the end."""
    message = request(sampling="dynamics: DYNAMICS_ODE num_steps: 50")
    call = stub.GenerateRollout(message, timeout=60)
    while not next(call).HasField("step"):
        pass
    calls = stub.GetStatus(pb.GetStatusRequest()).pipeline_calls
    list(call)
    assert stub.GetStatus(pb.GetStatusRequest()).pipeline_calls - calls > 10


@pytest.mark.parametrize(
    ("sampling", "output", "indices"),
    [
        ("num_steps: 4", "latents_selection: LATENTS_SELECTION_ALL", [0, 1, 2, 3, 4]),
        ("num_steps: 4", "latents_selection: LATENTS_SELECTION_FINAL", [4]),
        ("num_steps: 4", "latents_selection: LATENTS_SELECTION_NONE", []),
        ("num_steps: 4", "latents_indices { }", []),
        ("num_steps: 4", "latents_indices { indices: [0, 3] }", [0, 3]),
        (
            "num_steps: 4 stochastic_step_indices { indices: [0, 2] }",
            "latents_selection: LATENTS_SELECTION_STOCHASTIC",
            [0, 1, 2, 3],
        ),
        ("num_steps: 4 stochastic_step_indices { }", "latents_selection: LATENTS_SELECTION_STOCHASTIC", []),
    ],
)
def test_the_latents_asked_for_arrive(stub: Any, sampling: str, output: str, indices: list[int]) -> None:
    message = request(sampling=f"dynamics: DYNAMICS_SDE noise_level: 0.7 {sampling}", output=output)
    rollout = put_together(list(stub.GenerateRollout(message, timeout=60)))
    assert list(rollout.started.latents_indices) == indices
    assert sorted(rollout.tensors) == [(0, pb.TENSOR_ROLE_LATENTS, index) for index in indices]
    assert_totals(rollout)


@pytest.mark.parametrize("dtype", ["FLOAT32", "BFLOAT16", "FLOAT16"])
def test_latents_arrive_in_the_wire_dtype(stub: Any, dtype: str) -> None:
    message = request(output=f"latents_dtype: DATA_TYPE_{dtype} mean: true velocity: true noise: true")
    rollout = put_together(list(stub.GenerateRollout(message, timeout=60)))
    number = getattr(tensor_pb2, f"DATA_TYPE_{dtype}")
    assert rollout.accepted.latents_dtype == number
    for (_, role, _), (arrived, _, _) in rollout.tensors.items():
        assert arrived == (number if role == pb.TENSOR_ROLE_LATENTS else tensor_pb2.DATA_TYPE_FLOAT32)
    assert_totals(rollout)


def test_a_sample_that_starts_later_sends_what_it_runs(stub: Any) -> None:
    whole = put_together(list(stub.GenerateRollout(request(), timeout=60)))
    start = whole.tensors[0, pb.TENSOR_ROLE_LATENTS, 2]
    message = request()
    state = message.prompts[0].samples[0].start_state
    state.step_index = 2
    state.latents.CopyFrom(tensor_pb2.Tensor(dtype=start[0], shape=start[1], data=start[2]))
    rest = put_together(list(stub.GenerateRollout(message, timeout=60)))
    assert list(rest.steps) == [(0, 2), (0, 3)]
    assert rest.tensors == {key: value for key, value in whole.tensors.items() if key[2] >= 2}
    assert rest.steps == {key: value for key, value in whole.steps.items() if key[1] >= 2}
    assert_totals(rest)


def test_accepted_echoes_what_the_request_resolved_to(stub: Any) -> None:
    top = (1 << 64) - 1
    message = request(
        prompts=(f"seed_range {{ seed: {top - 1} count: 2 }}", "samples { seed: 5 initial_noise_seed: 0 }"),
        sampling="dynamics: DYNAMICS_CPS noise_level: 0.5",
        pipeline='height: 32 arguments { key: "prompt_2" value { string_value: "ü" } }',
        output="latents_dtype: DATA_TYPE_BFLOAT16 latents_selection: LATENTS_SELECTION_NONE",
    )
    accepted = put_together(list(stub.GenerateRollout(message, timeout=60))).accepted
    echoed = [(s.prompt_index, s.seed, s.initial_noise_seed, s.start_step) for s in accepted.samples]
    assert echoed == [(0, top - 1, top - 1, 0), (0, top, top, 0), (1, 5, 0, 0)]
    assert accepted.rollout_id
    assert accepted.num_steps == 4
    assert accepted.log_prob_kind == pb.LOG_PROB_KIND_SQUARED_ERROR
    assert (accepted.pipeline.height, accepted.pipeline.width, accepted.pipeline.guidance_scale) == (32, 48, 4.5)
    assert accepted.pipeline.arguments["prompt_2"].string_value == "ü"
    assert accepted.pipeline.arguments["max_sequence_length"].int_value == 64
    assert accepted.max_event_bytes == CONFIG.default_event_bytes
    assert accepted.latents_dtype == tensor_pb2.DATA_TYPE_BFLOAT16


# -- the writer alone, with frames as an engine sends them


def raw(*tensors: torch.Tensor) -> tuple[RawTensor, ...]:
    """Tensors as they are in a frame."""
    return tuple(RawTensor(t.dtype, tuple(t.shape), tensor_bytes(t)) for t in tensors)


def steps_frame(k: int, *tensors: torch.Tensor) -> Frame:
    """Step k of the samples 0 .. K-1, with x_k (first step only) and x_{k+1}, each [K, ...]."""
    rows = tensors[0].shape[0]
    fields = {
        "samples": list(range(rows)),
        "step_index": k,
        "policy_version": 0,
        "noise_std": 0.5,
        "log_prob": [0.25] * rows,
        "tensors": [("latents", k + 1 - position) for position in reversed(range(len(tensors)))],
    }
    return Frame("steps", fields, raw(*tensors))


def frames(rows: int, shape: Sequence[int], num_steps: int) -> list[Frame]:
    """The frames of a whole rollout without media."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(rows, *shape, generator=generator) for _ in range(num_steps + 1)]
    started = {
        "policy_version": 0,
        "sigmas": [1 - k / num_steps for k in range(num_steps + 1)],
        "stochastic_steps": list(range(num_steps)),
        "latents_indices": list(range(num_steps + 1)),
    }
    steps = [steps_frame(k, *(x[: k + 2] if k == 0 else x[k + 1 : k + 2])) for k in range(num_steps)]
    ends = [Frame("sample_finished", {"sample": sample, "error": None}) for sample in range(rows)]
    return [Frame("started", started), *steps, *ends]


def written(message: pb.GenerateRolloutRequest, made: list[Frame], config: ServerConfig = CONFIG) -> Events:
    """All events of a rollout."""
    parsed = parse(message, config=config)
    writer = EventWriter(parsed.spec, parsed.max_event_bytes)
    events = [writer.event(accepted=accepted_event(parsed, 0))]
    for frame in made:
        events += writer.events(frame)
    return [*events, writer.finished(0.5, 2.0)]


def two_samples(size: int) -> pb.GenerateRolloutRequest:
    """A request for two samples with an event size of its own."""
    return request(
        prompts=("seed_range { count: 2 }",),
        sampling="dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: 3",
        output=f"max_event_bytes: {size}",
    )


TENSOR_SHAPES = [(16, 32, 32), (16, 64, 64), (16, 128, 128), (16, 256, 250), (7, 111, 97)]


@pytest.mark.parametrize("shape", TENSOR_SHAPES, ids=str)
def test_bytes_on_the_wire_over_bytes_of_tensors(shape: tuple[int, ...]) -> None:
    """The budget is 1.002 for tensors of at least 64 KiB, here with 5 bytes of gRPC's frame around each message."""
    events = written(two_samples(MIB), frames(2, shape, 3))
    wire = sum(event.ByteSize() + 5 for event in events if event.HasField("step"))
    tensor_bytes_sent = events[-1].finished.tensor_bytes
    assert tensor_bytes_sent == 2 * 4 * 4 * math.prod(shape)
    assert wire / tensor_bytes_sent <= 1.002


@pytest.mark.parametrize("size", [MIN_EVENT_BYTES, 4099, 5000, 65_536, 100_003, MIB, MAX_EVENT_BYTES])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (16, 8, 6), (977,), (16, 33, 31), (16, 128, 128)], ids=str)
def test_events_are_bounded_and_lossless_for_any_size(size: int, shape: tuple[int, ...]) -> None:
    events = written(two_samples(size), made := frames(2, shape, 3))
    assert max(event.ByteSize() for event in events) <= size
    rollout = put_together(events)
    assert_totals(rollout)
    for frame in made:
        for (role, index), batch in zip(frame.fields.get("tensors", ()), frame.tensors, strict=True):
            assert role == "latents"
            for sample in range(2):
                assert rollout.tensors[sample, pb.TENSOR_ROLE_LATENTS, index][2] == bytes(batch.row(sample).data)


@pytest.mark.parametrize("size", [MIN_EVENT_BYTES, 20_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.bool, torch.int64], ids=str)
def test_conditioning_of_any_dtype_is_bounded_and_lossless(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(0, 2, shape, generator=generator).to(dtype)
        for shape in ((), (0, 3), (2, 9), (2, 333, 7), (9001,))
    ]
    entries = [entry(f"argument_{position}") for position in range(len(tensors))]
    made = frames(2, (4,), 3)
    conditioning = Frame("conditioning", {"prompt_index": 0, "entries": entries}, raw(*tensors))
    events = written(two_samples(size), [made[0], conditioning, *made[1:]])
    assert max(event.ByteSize() for event in events) <= size
    arrived = put_together(events).conditioning[0]
    assert [(value[3], value[-1][1], value[-1][2]) for value in arrived] == [
        (f"argument_{position}", tuple(tensor.shape), bytes(tensor_bytes(tensor)))
        for position, tensor in enumerate(tensors)
    ]


def entry(name: str, **changes: Any) -> dict[str, Any]:
    """One argument of a conditioning frame."""
    head = {"call_index": 0, "component": "transformer", "name": name, "rows_per_sample": 2, "batched": True}
    return head | {"value": None, "is_tensor": True} | changes


def test_conditioning_without_entries_still_ends() -> None:
    made = frames(2, (4,), 3)
    events = written(two_samples(MIB), [made[0], Frame("conditioning", {"prompt_index": 0, "entries": []}), *made[1:]])
    assert events[2].conditioning == pb.Conditioning(prompt_index=0, last=True)
    put_together(events)


def test_plain_values_of_the_conditioning_arrive_as_json() -> None:
    entries = [entry("scales", value=[1, 2.5, None, "ü"], is_tensor=False, batched=False)]
    made = frames(2, (4,), 3)
    events = written(
        two_samples(MIB), [made[0], Frame("conditioning", {"prompt_index": 0, "entries": entries}), *made[1:]]
    )
    assert events[2].conditioning.json_value == '[1, 2.5, null, "\\u00fc"]'
    assert events[2].conditioning.last


def test_conditioning_with_a_long_name_is_bounded() -> None:
    """Whatever the size of the value: whole, or in parts."""
    entries = [entry("a_long_name_of_an_argument_" * 8, component="transformer_2")]
    made = frames(2, (4,), 3)
    largest = {}
    for numel in range(3500, 4200, 20):
        conditioning = Frame("conditioning", {"prompt_index": 0, "entries": entries}, raw(torch.zeros(numel).byte()))
        events = written(two_samples(MIN_EVENT_BYTES), [made[0], conditioning, *made[1:]])
        largest[numel] = max(event.ByteSize() for event in events)
    assert {numel: size for numel, size in largest.items() if size > MIN_EVENT_BYTES} == {}


def test_a_long_error_message_is_cut_to_an_event() -> None:
    made = frames(2, (4,), 3)[:-2]
    for sample in (0, 1):
        error = ("PIPELINE_ERROR", "ü" * 10_000, 3)
        made.append(Frame("sample_finished", {"sample": sample, "error": error}))
    events = written(two_samples(MIN_EVENT_BYTES), made)
    assert max(event.ByteSize() for event in events) <= MIN_EVENT_BYTES
    ends = [event.sample_finished for event in events if event.HasField("sample_finished")]
    assert [set(end.error.message) for end in ends] == [{"ü"}] * 2
    assert events[-1].finished.num_failed == 2


LARGE = CONFIG.model_copy(
    update={"max_samples": 1024, "max_running_samples": 1024, "max_steps": 1000, "max_prompt_bytes": 16384}
)
LARGE_ECHOES = {
    "samples": {"prompts": ("seed_range { seed: 9223372036854775808 count: 1024 }",)},
    "arguments": {"pipeline": f'arguments {{ key: "prompt_2" value {{ string_value: "{"x" * 16384}" }} }}'},
}


LARGE_ECHOES["steps"] = {"sampling": "dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: 1000"}


@pytest.mark.parametrize("fields", LARGE_ECHOES.values(), ids=LARGE_ECHOES)
def test_the_echo_of_a_request_is_bounded(fields: dict[str, Any]) -> None:
    """`accepted` and `started` are not split: where they would not fit max_event_bytes, the request is refused."""
    with pytest.raises(ServiceError) as caught:
        parse(request(**fields, output=f"max_event_bytes: {MIN_EVENT_BYTES}"), config=LARGE)
    assert caught.value.field == "output.max_event_bytes"
    needed = int(re.findall(r"at least (\d+)", str(caught.value))[0])
    parsed = parse(request(**fields, output=f"max_event_bytes: {needed}"), config=LARGE)
    writer = EventWriter(parsed.spec, parsed.max_event_bytes)
    steps = parsed.spec.num_steps
    (started,) = writer.events(frames(1, (1,), steps)[0])
    for event in (writer.event(accepted=accepted_event(parsed, 1 << 31)), started):
        assert needed / 8 <= event.ByteSize() <= needed or event.ByteSize() <= MIN_EVENT_BYTES


def test_what_is_valid_by_default_has_an_echo_that_any_client_can_read() -> None:
    """Even the largest request under the default limits."""
    config = ServerConfig(model="none")
    arguments = " ".join(
        f'arguments {{ key: "{name}" value {{ string_value: "{"x" * config.max_prompt_bytes}" }} }}'
        for name, kinds in IMAGE_FACTS.arguments.items()
        if kinds == ["str"]
    )
    message = request(
        prompts=(f"seed_range {{ seed: {1 << 63} count: {config.max_samples} }}",),
        sampling=f"dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: {config.max_steps}",
        pipeline=arguments,
    )
    parsed = parse(message, config=config)
    assert accepted_event(parsed, 0).ByteSize() <= config.default_event_bytes


# -- one large latent over a real connection


class MadeUpService(rollout_pb2_grpc.RolloutServiceServicer):
    """Sends the events that the writer makes of given frames."""

    def __init__(self, made: list[Frame]) -> None:
        self._made = made

    def GenerateRollout(self, request: pb.GenerateRolloutRequest, context: Any) -> Iterator[pb.GenerateRolloutResponse]:
        """Every event, whatever is asked for."""
        yield from written(request, self._made)


@contextmanager
def made_up_server(made: list[Frame]) -> Iterator[str]:
    """A plain gRPC server on a free port."""
    server = grpc.server(ThreadPoolExecutor(2))
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(MadeUpService(made), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("output", ["", f"max_event_bytes: {2 * MIB}"], ids=["default", "2 MiB"])
def test_a_client_with_default_options_reads_a_latent_of_10_mib(output: str) -> None:
    shape = (16, 410, 400)
    made = frames(1, shape, 1)
    message = request(sampling="dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: 1", output=output)
    with made_up_server(made) as target:
        with grpc.insecure_channel(target) as channel:
            events = list(rollout_pb2_grpc.RolloutServiceStub(channel).GenerateRollout(message, timeout=60))
        with RolloutClient(target) as client:
            trajectory = client.send(message, timeout=60).collect()
    rollout = put_together(events)
    assert_totals(rollout)
    assert max(event.ByteSize() for event in events) <= (2 * MIB if output else MIB)
    assert trajectory.latents.shape == (1, 2, *shape)
    for index in (0, 1):
        sent = bytes(made[1].tensors[index].data)
        assert len(sent) == 4 * math.prod(shape) > 10_000_000
        assert rollout.tensors[0, pb.TENSOR_ROLE_LATENTS, index][2] == sent
        assert bytes(tensor_bytes(trajectory.latents[0, index])) == sent
