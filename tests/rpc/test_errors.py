"""Every error that a rollout can end with: on the wire, in the client library, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import rollout_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollout_service.engine.client import EngineClient
from rollout_service.rpc.servicer import RolloutServicer
from rollout_service.rpc.versions import PolicyVersions
from tests.rpc.support import (
    CONFIG,
    DOMAIN,
    LATENTS_SHAPE,
    LIMITS,
    LONG,
    NARROW,
    assert_serves,
    error_of,
    give_start,
    idle,
    open_stream,
    refusal_of,
    refused,
    request,
    start_state,
    typed_error,
    wait_until,
    wait_until_parked,
)
from tests.support.serving import RunningServer, running_server
from trainer_client import (
    AsyncRolloutClient,
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    OverLimitError,
    PolicyUnavailableError,
    QueueFullError,
    RolloutClient,
    Trajectory,
    UnavailableError,
)

ODE_WITH_NOISE = request(sampling="dynamics: DYNAMICS_ODE noise_level: 0.7")


def finite_trajectory(trajectory: Trajectory) -> bool:
    """Whether every sample arrived whole."""
    return not trajectory.errors and bool(torch.isfinite(trajectory.latents).all())


@pytest.fixture(autouse=True)
def _from_idle(client: RolloutClient) -> None:
    """A cancelled rollout of the test before ends at its next step, which may be now."""
    wait_until(lambda: idle(client))


# -- refused requests


def test_invalid_field(stub: Any, client: RolloutClient) -> None:
    error = refused(stub, ODE_WITH_NOISE)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert (error.domain, error.field) == (DOMAIN, "sampling.noise_level")
    assert "pass sde, dance or cps" in error.message
    typed = typed_error(client, ODE_WITH_NOISE)
    assert type(typed) is InvalidRequestError
    assert (typed.field, typed.reason, str(typed)) == (error.field, error.reason, error.message)


def test_over_limit(stub: Any, client: RolloutClient) -> None:
    message = request(prompts=("seed_range { count: 17 }",))
    error = refused(stub, message)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OVER_LIMIT")
    assert (error.domain, error.field) == (DOMAIN, "prompts")
    assert error.metadata == {"limit": "16", "limit_name": "max_samples", "value": "17"}
    typed = typed_error(client, message)
    assert type(typed) is OverLimitError
    assert (typed.field, typed.reason) == ("prompts", "OVER_LIMIT")


def test_a_message_that_grpc_does_not_take_is_over_a_limit(client: RolloutClient) -> None:
    message = request()
    give_start(message.prompts[0].samples[0], 1, torch.zeros(16, 256, 256))
    assert type(typed_error(client, message)) is OverLimitError


@pytest.mark.parametrize("size", [500, 20_000])
def test_a_long_argument_name_is_refused_as_any_other(stub: Any, size: int) -> None:
    """What a request holds must not make the status too large for the trailing metadata, of which 8 KiB are safe."""
    name = "x" * size
    try:
        error = refused(stub, request(pipeline=f'arguments {{ key: "{name}" value {{ int_value: 1 }} }}'))
    except ValueError as problem:  # the status that arrived is not the one that was sent
        pytest.fail(str(problem))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.field.startswith("pipeline.arguments[x")


@pytest.mark.parametrize("kind", ["exactly", "at_least"])
def test_policy_unavailable(stub: Any, client: RolloutClient, kind: str) -> None:
    message = request(policy=f"{kind}: 3")
    error = refused(stub, message)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POLICY_UNAVAILABLE")
    assert (error.domain, error.field) == (DOMAIN, f"policy.{kind}")
    typed = typed_error(client, message)
    assert type(typed) is PolicyUnavailableError
    assert typed.reason == "POLICY_UNAVAILABLE"


@pytest.mark.parametrize("kind", ["exactly", "at_least"])
def test_the_base_policy_is_available(client: RolloutClient, kind: str) -> None:
    assert finite_trajectory(client.send(request(policy=f"{kind}: 0 max_wait {{ seconds: 1 }}")).collect())


def test_queue_full(narrow_stub: Any, client: RolloutClient) -> None:
    message = request(**LONG)
    with open_stream(narrow_stub, message), open_stream(narrow_stub, message):
        # Nobody reads, so both park their 16 samples: as many as may run and wait.
        wait_until_parked(client, 32)
        assert (client.status().running_samples, client.status().queued_samples) == (32, 0)
        error = refused(narrow_stub, request())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert (error.domain, error.field) == (DOMAIN, "")
        assert error.retry_after_seconds is not None
        assert error.retry_after_seconds > 0
        typed = typed_error(client, request())
        assert type(typed) is QueueFullError
        assert (typed.reason, typed.retry_after_seconds) == ("QUEUE_FULL", error.retry_after_seconds)
    assert_serves(client)


def test_the_queue_takes_as_many_samples_as_it_has_room_for(narrow_stub: Any, client: RolloutClient) -> None:
    fifteen, two = (request(prompts=(f"seed_range {{ count: {count} }}",)) for count in (15, 2))
    with open_stream(narrow_stub, request(**LONG)), open_stream(narrow_stub, fifteen):
        assert refused(narrow_stub, two).reason == "QUEUE_FULL"
        with open_stream(narrow_stub, request()):
            assert client.status().open_streams == 3
    assert_serves(client)


# -- streams that end early


def assert_stopped(client: RolloutClient, calls_before: int) -> None:
    """The engine has left the rollout before its last step, and does nothing more for it."""
    wait_until(lambda: idle(client), 5)
    calls = client.status().pipeline_calls
    assert calls - calls_before < 50
    time.sleep(0.3)
    assert client.status().pipeline_calls == calls


def test_deadline_exceeded(stub: Any, client: RolloutClient) -> None:
    before = client.status().pipeline_calls
    assert refused(stub, request(**LONG), timeout=0.5).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_stopped(client, before)
    assert type(typed_error(client, request(**LONG), timeout=0.5)) is DeadlineExceededError
    assert_serves(client)


def test_cancelled(stub: Any, client: RolloutClient) -> None:
    before = client.status().pipeline_calls
    call = stub.GenerateRollout(request(**LONG), timeout=60)
    while next(call).WhichOneof("event") != "step":
        pass
    call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert_stopped(client, before)


def test_cancelled_in_the_client_library(client: RolloutClient) -> None:
    before = client.status().pipeline_calls
    stream = client.send(request(**LONG), timeout=60)
    next(iter(stream))
    stream.cancel()
    assert type(error_of(stream)) is CancelledError
    assert_stopped(client, before)


def test_a_stream_that_is_dropped_is_cancelled(client: RolloutClient) -> None:
    before = client.status().pipeline_calls
    for number, _ in enumerate(client.send(request(**LONG), timeout=60)):
        if number == 3:
            break
    assert_stopped(client, before)
    with client.send(request(**LONG), timeout=60):
        pass
    assert_stopped(client, before)


def test_a_client_that_goes_away_cancels_its_rollout(service: RunningServer, client: RolloutClient) -> None:
    before = client.status().pipeline_calls
    with RolloutClient(service.target) as other:
        events = iter(other.send(request(**LONG), timeout=60))
        next(events)
        wait_until(lambda: client.status().running_samples == 16)
    assert_stopped(client, before)


def test_a_rollout_that_is_cancelled_while_it_waits_never_runs(narrow_stub: Any, client: RolloutClient) -> None:
    before = client.status().pipeline_calls
    with ThreadPoolExecutor(1) as pool:
        unparked = LONG | {"output": "latents_selection: LATENTS_SELECTION_NONE"}
        running = pool.submit(client.send(request(**unparked), timeout=60).collect)
        wait_until(lambda: client.status().running_samples == 16)
        with open_stream(narrow_stub, request(**LONG)):
            wait_until(lambda: client.status().queued_samples == 16)
        assert not running.result().errors
    assert_serves(client)
    assert client.status().pipeline_calls == before + 50 + 4


def test_a_reader_that_has_stopped_keeps_nobody_from_starting(narrow_stub: Any, client: RolloutClient) -> None:
    """Its samples fill all places of running ones, but a parked sample holds none."""
    with open_stream(narrow_stub, request(**LONG)):
        wait_until_parked(client, 16)
        assert not client.send(request(prompts=("seed_range { count: 16 }",)), timeout=60).collect().errors
        assert client.status().parked_samples == 16


async def test_errors_of_the_async_client(service: RunningServer) -> None:
    async with AsyncRolloutClient(service.target) as client:
        with pytest.raises(InvalidRequestError) as invalid:
            await client.send(ODE_WITH_NOISE).collect()
        assert invalid.value.field == "sampling.noise_level"
        with pytest.raises(PolicyUnavailableError):
            await client.send(request(policy="exactly: 3")).collect()
        with pytest.raises(DeadlineExceededError):
            await client.send(request(**LONG), timeout=0.5).collect()


async def test_cancelling_a_stream_of_the_async_client_raises_its_own_error(service: RunningServer) -> None:
    """An asyncio.CancelledError would mean that the task was cancelled, which it was not."""
    async with AsyncRolloutClient(service.target) as client:
        stream = client.send(request(**LONG), timeout=60)
        try:
            async for _ in stream:
                stream.cancel()
        except asyncio.CancelledError:
            pytest.fail("asyncio.CancelledError, though nobody cancelled the task")
        except CancelledError:
            pass
        else:
            pytest.fail("the stream ended as if it were complete")


# -- samples that fail alone

#: In step 1, which is the only stochastic one, x_1 is multiplied by about -30: float16 holds no 60000 * 30.
BLOW_UP = "dynamics: DYNAMICS_DANCE noise_level: 20 num_steps: 4 stochastic_step_indices { indices: 1 }"
FLOAT16 = "latents_dtype: DATA_TYPE_FLOAT16"


#: The seed of a sample that starts from latents near the end of float16's range.
HUGE = 99


def latents(seed: int) -> torch.Tensor:
    """The x_k in float16 that a sample starts from."""
    if seed == HUGE:
        return torch.full(LATENTS_SHAPE, 6e4).half()
    return torch.randn(LATENTS_SHAPE, generator=torch.Generator().manual_seed(seed)).half()


def batch(*seeds: int, step: int) -> pb.GenerateRolloutRequest:
    """Samples of one prompt that start from x_k given by their seeds, and so run as one batch."""
    samples = " ".join(f"samples {{ seed: {seed} {start_state(step, latents(seed))} }}" for seed in seeds)
    return request(prompts=(samples,), sampling=BLOW_UP, output=FLOAT16)


@pytest.mark.parametrize("step", [0, 1])
def test_non_finite(client: RolloutClient, step: int) -> None:
    trajectory = client.send(batch(1, HUGE, 2, step=step)).collect()
    assert set(trajectory.errors) == {1}
    error = trajectory.errors[1]
    assert (error.reason, error.step_index) == (pb.ERROR_REASON_NON_FINITE, 1)
    assert error.message
    assert (trajectory.finished.num_finished, trajectory.finished.num_failed) == (2, 1)
    # What came before remains: x_0 and x_1, where the sample began there.
    have = torch.isfinite(trajectory.latents[1].flatten(1)).all(1)
    assert have.tolist() == ([True, True, False, False, False] if step == 0 else [False] * 5)
    assert torch.isnan(trajectory.log_probs[1]).all()
    # Its siblings do not notice.
    with_healthy = client.send(batch(1, 3, 2, step=step)).collect()
    assert not with_healthy.errors
    for sample, seed in ((0, 1), (2, 2)):
        assert torch.equal(trajectory.latents[sample, step:], with_healthy.latents[sample, step:])
        assert torch.equal(trajectory.log_probs[sample], with_healthy.log_probs[sample])
        alone = client.send(batch(seed, step=step)).collect()
        # A float16 ulp or two: a batch of another size may round otherwise.
        torch.testing.assert_close(trajectory.latents[sample, step:], alone.latents[0, step:], rtol=4e-3, atol=4e-3)


def test_non_finite_on_the_wire(stub: Any) -> None:
    events = list(stub.GenerateRollout(batch(1, HUGE, step=0), timeout=60))
    ends = {e.sample_finished.sample_index: e.sample_finished for e in events if e.HasField("sample_finished")}
    assert not ends[0].HasField("error")
    assert ends[0].num_steps == 4
    assert ends[1].last
    assert ends[1].error.reason == pb.ERROR_REASON_NON_FINITE
    assert (ends[1].num_steps, ends[1].error.step_index) == (1, 1)
    after = events[[e.sample_finished.sample_index for e in events].index(1) + 1 :]
    assert not any(step.sample_index == 1 for event in after for step in event.step.steps)
    finished = events[-1].finished
    assert (finished.num_finished, finished.num_failed, finished.num_steps) == (1, 1, 5)


EVERY_SAMPLE = [
    {"sampling": "dynamics: DYNAMICS_SDE noise_level: 1e200"},
    {"sampling": "dynamics: DYNAMICS_DANCE noise_level: 1e308"},
    {"pipeline": "guidance_scale: 1e308"},
]


@pytest.mark.parametrize("fields", EVERY_SAMPLE, ids=lambda fields: str(*fields.values()))
def test_all_samples_may_become_non_finite(client: RolloutClient, fields: dict[str, str]) -> None:
    trajectory = client.send(
        request(prompts=("seed_range { count: 3 }", "seed_range { count: 2 }"), **fields)
    ).collect()
    assert set(trajectory.errors) == set(range(5))
    assert {e.reason for e in trajectory.errors.values()} == {pb.ERROR_REASON_NON_FINITE}
    assert (trajectory.finished.num_finished, trajectory.finished.num_failed) == (0, 5)
    assert_serves(client)


EXTREMES = [
    {"sampling": "dynamics: DYNAMICS_SDE noise_level: 5e-324"},
    {"sampling": "dynamics: DYNAMICS_DANCE noise_level: 0.7 sigmas: [1e-45, 0]"},
    {"sampling": "dynamics: DYNAMICS_SDE noise_level: 0.7 sigmas: [1, 0.99999994, 0.5, 1e-44]"},
    {"sampling": "dynamics: DYNAMICS_CPS noise_level: 1 sigmas: [1, 0]"},
    {"sampling": "dynamics: DYNAMICS_ODE sigmas: [0.1, 0.05]"},
    {"pipeline": "guidance_scale: 0"},
    {"prompts": ('prompt: "" negative_prompt: "\\000" samples { }',)},
    {"prompts": (f'prompt: "{"😀" * 250}" samples {{ seed: 18446744073709551615 }}',)},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=lambda fields: str(*fields.values())[:70])
def test_what_is_valid_but_extreme_runs(client: RolloutClient, fields: dict[str, str]) -> None:
    assert finite_trajectory(client.send(request(**fields), timeout=30).collect())


BAD_ARGUMENTS = ["max_sequence_length: 4000", "max_sequence_length: -1", "clip_skip: 100", "clip_skip: 4096"]


def bad_argument(text: str) -> str:
    """A pipeline argument that only the pipeline can refuse."""
    name, _, value = text.partition(": ")
    return f'arguments {{ key: "{name}" value {{ int_value: {value} }} }}'


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_pipeline_error(stub: Any, client: RolloutClient, argument: str) -> None:
    message = request(prompts=("seed_range { count: 2 }", "samples { }"), pipeline=bad_argument(argument))
    # Another rollout runs meanwhile, to its end.
    other = client.send(request(sampling="dynamics: DYNAMICS_ODE num_steps: 20"), timeout=60)
    events = list(stub.GenerateRollout(message, timeout=60))
    assert finite_trajectory(other.collect())
    assert [event.sequence for event in events] == list(range(len(events)))
    assert events[0].HasField("accepted")
    ends = [event.sample_finished for event in events if event.HasField("sample_finished")]
    assert sorted(end.sample_index for end in ends) == [0, 1, 2]
    for end in ends:
        assert end.last
        assert (end.error.reason, end.error.step_index, end.num_steps) == (pb.ERROR_REASON_PIPELINE_ERROR, 0, 0)
        assert "Error: " in end.error.message
    assert (events[-1].finished.num_finished, events[-1].finished.num_failed) == (0, 3)


def test_pipeline_error_says_what_the_pipeline_said(stub: Any) -> None:
    events = list(stub.GenerateRollout(request(pipeline=bad_argument(BAD_ARGUMENTS[0])), timeout=60))
    (end,) = (event.sample_finished for event in events if event.HasField("sample_finished"))
    assert "`max_sequence_length` cannot be greater than 512 but is 4000" in end.error.message


def test_start_latents_of_another_shape_are_a_fault_of_the_request(stub: Any, client: RolloutClient) -> None:
    """Only the pipeline knows the shape: the refusal comes after `accepted`, and names the sample."""
    wrong = torch.zeros(16, 6, 8)
    message = request(
        prompts=("seed_range { count: 3 }", f"samples {{ }} samples {{ {start_state(2, wrong)} }}"),
    )
    error = refused(stub, message)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert (error.domain, error.field) == (DOMAIN, "prompts[1].samples[1].start_state.latents")
    assert "[16, 6, 8]" in error.message
    assert "[16, 8, 6]" in error.message
    typed = typed_error(client, message)
    assert type(typed) is InvalidRequestError
    assert typed.field == error.field
    assert_serves(client)


# -- a server that is not there


def test_nobody_listens() -> None:
    with RolloutClient("127.0.0.1:1") as client:
        assert type(typed_error(client, request())) is UnavailableError
        with pytest.raises(UnavailableError):
            client.status()


async def test_a_draining_servicer_says_so(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"policy_store": str(tmp_path), "policy_scratch": str(tmp_path)})
    engine = EngineClient(CONFIG.engine_settings("unused"))
    servicer = RolloutServicer(engine, PolicyVersions(engine, config), config)
    servicer.drain()
    server = grpc.aio.server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                async for _ in rollout_pb2_grpc.RolloutServiceStub(channel).GenerateRollout(request()):
                    pass
        error = refusal_of(caught.value)
        assert (error.code, error.reason, error.domain) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", DOMAIN)
        async with AsyncRolloutClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(UnavailableError) as typed:
                await client.send(request()).collect()
            assert typed.value.reason == "DRAINING"
    finally:
        await server.stop(0)


class HealthWatch:
    """The states that the health service reports of the whole server, as they come."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.states: list[int] = []
        self._call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._call:
                self.states.append(response.status)
        except grpc.RpcError:
            pass

    def close(self) -> None:
        """Stop watching."""
        self._call.cancel()
        self._thread.join()


@pytest.fixture(scope="module")
def fragile(model_path: Path) -> Iterator[RunningServer]:
    """A server of their own for the tests that break it; the last of them shuts it down."""
    with running_server(model_path, **LIMITS | {"drain_seconds": 3}) as server:
        yield server


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.slow
def test_engine_restarted(fragile: RunningServer) -> None:
    with grpc.insecure_channel(fragile.target, NARROW) as channel, RolloutClient(fragile.target) as client:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        watch = HealthWatch(channel)
        try:
            wait_until(lambda: watch.states == [SERVING])
            with open_stream(stub, request(**LONG)) as parked:
                wait_until_parked(client, 16)
                waiting = client.send(request(**LONG), timeout=60)
                wait_until(lambda: client.status().open_streams == 2)
                pid = fragile.server.engine.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
                with pytest.raises(grpc.RpcError) as caught:
                    for _ in parked:
                        pass
            error = refusal_of(caught.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTED")
            assert error.domain == DOMAIN
            assert error.retry_after_seconds
            # Whoever waited, and whoever comes before the engine is up again, gets the same; health and status say so.
            for typed in (error_of(waiting), typed_error(client, request())):
                assert type(typed) is UnavailableError
                assert typed.reason == "ENGINE_RESTARTED"
            wait_until(lambda: watch.states == [SERVING, NOT_SERVING], 5)
            assert not client.status().serving
            assert time.monotonic() - killed < 5
            wait_until(lambda: watch.states == [SERVING, NOT_SERVING, SERVING], 120)
            status = client.status()
            assert status.serving
            assert (status.engine_restarts, status.open_streams) == (1, 0)
            assert fragile.server.engine.pid != pid
            assert_serves(client)
        finally:
            watch.close()


def read_slowly(call: Any) -> None:
    """Read a stream to its end."""
    for _ in call:
        time.sleep(0.3)


@pytest.mark.slow
def test_draining(fragile: RunningServer) -> None:
    """Shuts the server down, so it is the last to use it."""
    with grpc.insecure_channel(fragile.target, NARROW) as channel, RolloutClient(fragile.target) as client:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        watch = HealthWatch(channel)
        wait_until(lambda: watch.states == [SERVING])
        endless = stub.GenerateRollout(request(**LONG | {"prompts": "seed_range { count: 15 }"}), timeout=60)
        wait_until_parked(client, 15)
        short = client.send(request(sampling="dynamics: DYNAMICS_ODE num_steps: 50"), timeout=60)
        wait_until(lambda: client.status().open_streams == 2)
        draining = asyncio.run_coroutine_threadsafe(fragile.server.drain(), fragile.loop)
        try:
            wait_until(lambda: watch.states == [SERVING, NOT_SERVING], 5)
            # New rollouts go elsewhere.
            with RolloutClient(fragile.target) as newcomer:
                for one in (client, newcomer):
                    assert type(typed_error(one, request())) is UnavailableError
            # What has time enough runs to its end; the rest, here a slow reader, is told to resume elsewhere.
            assert finite_trajectory(short.collect())
            with pytest.raises(grpc.RpcError) as caught:
                read_slowly(endless)
            error = refusal_of(caught.value)
            assert error.code is grpc.StatusCode.UNAVAILABLE
            assert error.reason == "DRAINING"
        finally:
            draining.result(60)
            watch.close()
