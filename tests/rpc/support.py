"""What the tests of this folder share: requests from text, refusals taken apart, facts for tests without a server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from google.protobuf import text_format
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from torch import Tensor

from rollout_service.config import ServerConfig
from rollout_service.models.loading import PipelineFacts
from rollout_service.rpc.errors import ServiceError
from rollout_service.rpc.request import ParsedRequest, parse_request
from rollout_service.tensors import to_message
from trainer_client import RolloutClient, RolloutError, RolloutStream

DOMAIN = "diffusion-rollout"

#: Limits that are cheap to go over; the shared server and the tests without one have the same.
LIMITS: dict[str, int] = {
    "max_samples": 16,
    "max_steps": 50,
    "max_prompts": 4,
    "max_prompt_bytes": 1000,
    "max_pixels": 128 * 128,
    "max_frames": 33,
    "max_request_bytes": 1 << 20,
    "max_running_samples": 16,
    "max_queued_samples": 16,
    "stream_buffer_bytes": 1 << 20,
}
CONFIG = ServerConfig(model="none", **LIMITS)

#: The facts of the tiny SD3 pipeline that the shared server runs.
IMAGE_FACTS = PipelineFacts(
    model="sd3",
    pipeline_class="StableDiffusion3Pipeline",
    model_dtype="float32",
    device="cpu",
    size_multiple=16,
    frame_multiple=0,
    arguments={
        "prompt_2": ["str"],
        "clip_skip": ["int"],
        "max_sequence_length": ["int"],
        "mu": ["float"],
    },
    has_negative_prompt=True,
    has_guidance_scale=True,
    has_size=True,
    default_steps=4,
    default_arguments={"height": 64, "width": 48, "guidance_scale": 4.5, "max_sequence_length": 64},
)
#: A video pipeline, with an argument of each kind.
VIDEO_FACTS = dataclasses.replace(
    IMAGE_FACTS,
    pipeline_class="WanPipeline",
    frame_multiple=4,
    arguments={"flag": ["bool"], "number": ["int"], "ratio": ["float"], "text": ["str"], "either": ["int", "str"]},
    default_arguments={"height": 32, "width": 48, "num_frames": 5, "guidance_scale": 5.0},
)
#: A pipeline that takes neither a negative prompt, nor a guidance scale, nor a size.
BARE_FACTS = dataclasses.replace(
    IMAGE_FACTS,
    pipeline_class="BarePipeline",
    arguments={},
    has_negative_prompt=False,
    has_guidance_scale=False,
    has_size=False,
    default_arguments={},
)

LATENTS_SHAPE = (16, 8, 6)
"""The shape of the shared server's latents at its default size."""

#: A valid request, by top-level field, in protobuf's text format.
VALID: dict[str, str | tuple[str, ...]] = {
    "prompts": ('prompt: "a red circle" samples { seed: 7 }',),
    "sampling": "dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: 4",
}


def request(**fields: str | Iterable[str]) -> pb.GenerateRolloutRequest:
    """A valid request, with the top-level fields that are given in their place; ``prompts`` may be several."""
    message = pb.GenerateRolloutRequest()
    for name, value in (VALID | fields).items():
        for text in (value,) if isinstance(value, str) else value:
            text_format.Merge(f"{name} {{ {text} }}", message)
    return message


def give_start(sample: pb.SampleRequest, step_index: int, latents: Tensor) -> None:
    """Give a sample a start state."""
    sample.start_state.step_index = step_index
    sample.start_state.latents.CopyFrom(to_message(latents))


def start_state(step_index: int, latents: Tensor) -> str:
    """A sample's start state in text format (slow for large tensors)."""
    sample = pb.SampleRequest()
    give_start(sample, step_index, latents)
    return text_format.MessageToString(sample, as_one_line=True)


def parse(
    message: pb.GenerateRolloutRequest, facts: PipelineFacts = IMAGE_FACTS, config: ServerConfig = CONFIG
) -> ParsedRequest:
    """The service's own parsing."""
    return parse_request(message, "rollout-1", facts, config)


@dataclass(frozen=True)
class Refusal:
    """A status as a client in any language sees it."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    domain: str = ""
    field: str = ""
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    retry_after_seconds: float | None = None


def _taken_apart(code: grpc.StatusCode, message: str, details: Iterable[Any]) -> Refusal:
    values: dict[str, Any] = {}
    for detail in details:
        info, bad_request, retry_info = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            values |= {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
        elif detail.Unpack(bad_request):
            (violation,) = bad_request.field_violations
            assert violation.description
            values["field"] = violation.field
        elif detail.Unpack(retry_info):
            values["retry_after_seconds"] = retry_info.retry_delay.ToTimedelta().total_seconds()
        else:
            raise AssertionError(f"an unexpected detail: {detail.type_url}")
    return Refusal(code, message, **values)


def refusal_of(error: grpc.RpcError | ServiceError) -> Refusal:
    """The parts of an error, from the wire or from the service's own code."""
    if isinstance(error, ServiceError):
        return _taken_apart(error.code, str(error), error.to_status().details)
    status = rpc_status.from_call(error)  # also checks that the status agrees with the call's code and message
    return _taken_apart(error.code(), error.details(), status.details if status is not None else ())


def refused(stub: Any, message: pb.GenerateRolloutRequest, timeout: float = 60) -> Refusal:
    """The error that ends a rollout on the wire."""
    try:
        for _ in stub.GenerateRollout(message, timeout=timeout):
            pass
    except grpc.RpcError as error:
        return refusal_of(error)
    raise AssertionError("the rollout did not fail")


def refusal(call: Callable[[], Any]) -> Refusal:
    """The error that ends a call on the wire."""
    try:
        call()
    except grpc.RpcError as error:
        return refusal_of(error)
    raise AssertionError("the call did not fail")


def typed_error(client: RolloutClient, message: pb.GenerateRolloutRequest, timeout: float = 60) -> RolloutError:
    """The client library's error of a rollout that fails."""
    return error_of(client.send(message, timeout=timeout))


def error_of(stream: RolloutStream) -> RolloutError:
    """The client library's error of a stream that fails."""
    try:
        for _ in stream:
            pass
    except RolloutError as error:
        return error
    raise AssertionError("the rollout did not fail")


def wait_until(condition: Callable[[], bool], seconds: float = 30, every: float = 0.02) -> None:
    """Poll until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(every)


def idle(client: RolloutClient) -> bool:
    """Whether the server has nothing left to do."""
    status = client.status()
    return not (status.running_samples or status.queued_samples or status.parked_samples or status.open_streams)


def assert_serves(client: RolloutClient) -> None:
    """The server becomes idle and runs a normal rollout to its end."""
    wait_until(lambda: idle(client))
    trajectory = client.send(request(), timeout=60).collect()
    assert not trajectory.errors
    assert torch.isfinite(trajectory.latents).all()
    wait_until(lambda: idle(client))


@contextmanager
def open_stream(stub: Any, message: pb.GenerateRolloutRequest) -> Iterator[Any]:
    """A stream that has been accepted, cancelled at the end; nothing more is read of it unless the test does."""
    call = stub.GenerateRollout(message, timeout=120)
    try:
        assert next(call).WhichOneof("event") == "accepted"
        yield call
    finally:
        call.cancel()


#: Channel options for a small and constant flow control window; gRPC's own grows to tens of megabytes.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))


def wait_until_parked(client: RolloutClient, samples: int) -> None:
    """Wait until so many samples are parked, and stay so: the buffers between the engine and the reader are full."""
    calls = -1

    def parked() -> bool:
        nonlocal calls
        status = client.status()
        before, calls = calls, status.pipeline_calls
        return status.parked_samples == samples and calls == before

    wait_until(parked, every=0.2)


#: Seconds of work, and 50 MB: nobody's buffers hold them.
LONG = {
    "prompts": 'prompt: "long" seed_range { count: 16 }',
    "sampling": "dynamics: DYNAMICS_SDE noise_level: 0.7 num_steps: 50",
    "pipeline": "height: 128 width: 128",
    "output": "noise: true mean: true velocity: true",
}
