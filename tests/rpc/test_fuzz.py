"""Requests that are wrong in any way, and bytes that are no request: refused as promised, and the server goes on."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import tensor_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_service.config import MAX_EVENT_BYTES, MIN_EVENT_BYTES
from rollout_service.rpc.errors import ServiceError
from tests.rpc.support import (
    DOMAIN,
    IMAGE_FACTS,
    LATENTS_SHAPE,
    LIMITS,
    Refusal,
    assert_serves,
    parse,
    refusal_of,
    refused,
    request,
)
from tests.support.serving import RunningServer
from trainer_client import RolloutClient

Request = pb.GenerateRolloutRequest
Draw = Callable[[st.SearchStrategy[Any]], Any]
Mutation = Callable[[Draw, Request], None]

FIXED = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
TOP = (1 << 64) - 1
UINT32 = (1 << 32) - 1
SEEDS = st.integers(0, TOP)
NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf")])
LATENTS_BYTES = 4 * 16 * 8 * 6
STOCHASTIC = st.sampled_from([pb.DYNAMICS_SDE, pb.DYNAMICS_DANCE, pb.DYNAMICS_CPS])


def unknown(*known: int) -> st.SearchStrategy[int]:
    """Numbers of an enum that a field does not allow."""
    return st.integers(-(1 << 31), (1 << 31) - 1).filter(lambda number: number not in known)


def bad_indices(stop: int) -> st.SearchStrategy[list[int]]:
    """Indices that are not strictly increasing in [0, stop)."""
    disordered = st.lists(st.integers(0, stop - 1), min_size=2, max_size=6).filter(lambda v: sorted(set(v)) != v)
    beyond = st.lists(st.integers(stop, UINT32), min_size=1, max_size=3)
    return disordered | beyond


# -- a valid request


def valid(seed: int) -> Request:
    """A random request that can run. Not drawn value by value: that would take longer than all that is tested."""
    chance = random.Random(seed)
    message = Request()
    sampling = message.sampling
    sampling.num_steps = 4
    sampling.dynamics = chance.randint(1, 4)
    if sampling.dynamics != pb.DYNAMICS_ODE:
        sampling.noise_level = chance.uniform(0.01, 1)
        sampling.log_prob_kind = chance.randint(0, 2)
    sampling.noise_mode = chance.randint(0, 2)
    if chance.random() < 0.5:
        sampling.sigmas.extend([1, 0.75, 0.5, 0.25, 0])
    for _ in range(chance.randint(1, LIMITS["max_prompts"])):
        prompt = message.prompts.add(prompt="".join(chance.choices("ab ü😀\0", k=chance.randint(0, 8))))
        if chance.random() < 0.5:
            prompt.negative_prompt = chance.choice(["", "blurred"])
        if chance.random() < 0.5:
            prompt.seed_range.seed, prompt.seed_range.count = chance.randint(0, TOP - 4), chance.randint(1, 4)
        for _ in range(0 if prompt.HasField("seed_range") else chance.randint(1, 3)):
            sample = prompt.samples.add(seed=chance.randint(0, TOP))
            if chance.random() < 0.5:
                whole_state(sample, step_index=chance.randint(0, 3))
            if chance.random() < 0.5 and sampling.noise_mode != pb.NOISE_MODE_SEQUENTIAL:
                sample.initial_noise_seed = chance.randint(0, TOP)
    if chance.random() < 0.5:
        message.pipeline.height, message.pipeline.width = chance.choice([(64, 64), (16, 128), (128, 128)])
    if chance.random() < 0.5:
        message.pipeline.guidance_scale = chance.uniform(0, 20)
    message.pipeline.arguments["max_sequence_length"].int_value = chance.randint(1, 64)
    message.output.latents_selection = chance.randint(0, 4)
    message.output.latents_dtype = chance.randint(0, 1)
    message.output.media = chance.randint(0, 3)
    for name in ("conditioning", "noise", "mean", "velocity"):
        setattr(message.output, name, chance.random() < 0.5)
    message.output.max_event_bytes = chance.randint(MIN_EVENT_BYTES, MAX_EVENT_BYTES)
    return message


def whole_state(sample: pb.SampleRequest, **fields: Any) -> tensor_pb2.Tensor:
    """Give a sample a start state that is right; returns its latents."""
    sample.start_state.CopyFrom(pb.StartState(**fields))
    latents = sample.start_state.latents
    latents.dtype = tensor_pb2.DATA_TYPE_FLOAT32
    latents.shape.extend(LATENTS_SHAPE)
    latents.data = bytes(LATENTS_BYTES)
    return latents


# -- what makes it invalid, each whatever else the request holds


def a_prompt(draw: Draw, message: Request) -> pb.PromptRequest:
    """One of the prompts."""
    if not message.prompts:
        message.prompts.add().samples.add()
    return draw(st.sampled_from(list(message.prompts)))


def a_sample(draw: Draw, message: Request) -> pb.SampleRequest:
    """One of the samples of a prompt, which then has no seed range."""
    prompt = a_prompt(draw, message)
    prompt.ClearField("seed_range")
    return draw(st.sampled_from(list(prompt.samples) or [prompt.samples.add()]))


def a_state(draw: Draw, message: Request) -> tensor_pb2.Tensor:
    """The latents of a start state that is right."""
    message.output.latents_dtype = tensor_pb2.DATA_TYPE_FLOAT32
    return whole_state(a_sample(draw, message), step_index=draw(st.integers(0, 3)))


def four_steps(message: Request) -> pb.SamplingSettings:
    """The sampling settings, of four steps."""
    message.sampling.num_steps = 4
    message.sampling.ClearField("sigmas")
    return message.sampling


def no_prompts(draw: Draw, message: Request) -> None:
    message.ClearField("prompts")


def too_many_prompts(draw: Draw, message: Request) -> None:
    for _ in range(LIMITS["max_prompts"] + 1):
        message.prompts.add().samples.add()


def no_samples(draw: Draw, message: Request) -> None:
    prompt = a_prompt(draw, message)
    prompt.ClearField("samples")
    prompt.ClearField("seed_range")


def samples_and_a_range(draw: Draw, message: Request) -> None:
    prompt = a_prompt(draw, message)
    prompt.samples.add()
    prompt.seed_range.count = draw(st.integers(0, 2))


def a_range_of_none(draw: Draw, message: Request) -> None:
    prompt = a_prompt(draw, message)
    prompt.ClearField("samples")
    prompt.seed_range.seed, prompt.seed_range.count = draw(SEEDS), 0


def a_range_beyond_the_top(draw: Draw, message: Request) -> None:
    prompt = a_prompt(draw, message)
    prompt.ClearField("samples")
    count = draw(st.integers(2, LIMITS["max_samples"]))
    prompt.seed_range.seed, prompt.seed_range.count = draw(st.integers(TOP - count + 2, TOP)), count


def too_many_samples(draw: Draw, message: Request) -> None:
    prompt = a_prompt(draw, message)
    prompt.ClearField("samples")
    prompt.seed_range.count = draw(st.integers(LIMITS["max_samples"] + 1, UINT32))


def too_long_a_text(draw: Draw, message: Request) -> None:
    text = draw(st.sampled_from("xü😀")) * (LIMITS["max_prompt_bytes"] + 1)
    match draw(st.sampled_from(["prompt", "negative_prompt", "argument"])):
        case "argument":
            message.pipeline.arguments["prompt_2"].string_value = text
        case name:
            setattr(a_prompt(draw, message), name, text)


def sequential_with_an_initial_seed(draw: Draw, message: Request) -> None:
    message.sampling.noise_mode = pb.NOISE_MODE_SEQUENTIAL
    a_sample(draw, message).initial_noise_seed = draw(SEEDS)


def a_start_beyond_the_last_step(draw: Draw, message: Request) -> None:
    four_steps(message)
    whole_state(a_sample(draw, message), step_index=draw(st.integers(4, UINT32)))


def a_start_of_another_dtype(draw: Draw, message: Request) -> None:
    a_state(draw, message).dtype = draw(unknown(tensor_pb2.DATA_TYPE_FLOAT32))


def a_start_of_another_shape(draw: Draw, message: Request) -> None:
    shape = st.lists(st.integers(0, UINT32), max_size=10).filter(lambda s: tuple(s) != LATENTS_SHAPE)
    small = st.sampled_from([[], [0], [16, 8], [16, 0, 6], [1] * 9, [16, 8, 6, 2]])
    a_state(draw, message).shape[:] = draw(shape | small)


def a_start_of_another_length(draw: Draw, message: Request) -> None:
    a_state(draw, message).data = bytes(draw(st.sampled_from([0, 1, LATENTS_BYTES - 1, LATENTS_BYTES + 4])))


def a_start_with_an_offset(draw: Draw, message: Request) -> None:
    a_state(draw, message).offset = draw(st.integers(1, TOP))


def a_start_that_is_not_finite(draw: Draw, message: Request) -> None:
    latents = a_state(draw, message)
    position = 4 * draw(st.integers(0, LATENTS_BYTES // 4 - 1))
    wrong = draw(st.sampled_from([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\1\0\x80\x7f"]))
    latents.data = latents.data[:position] + wrong + latents.data[position + 4 :]


def dynamics_unknown(draw: Draw, message: Request) -> None:
    message.sampling.dynamics = draw(st.just(0) | unknown(0, 1, 2, 3, 4))


def a_wrong_number_of_steps(draw: Draw, message: Request) -> None:
    message.sampling.num_steps = draw(st.just(0) | st.integers(LIMITS["max_steps"] + 1, UINT32))


def a_wrong_number_of_sigmas(draw: Draw, message: Request) -> None:
    sigmas = four_steps(message).sigmas
    count = draw(st.integers(1, 60).filter(lambda n: n != 5))
    sigmas.extend(1 - k / 64 for k in range(count))
    if draw(st.booleans()) and count in (1, *range(LIMITS["max_steps"] + 2, 61)):
        message.sampling.ClearField("num_steps")


def a_wrong_sigma(draw: Draw, message: Request) -> None:
    sigmas = four_steps(message).sigmas
    sigmas.extend([0.8, 0.6, 0.4, 0.2, 0])
    below_or_above = st.floats(max_value=-0.001) | st.floats(min_value=1.001)
    sigmas[draw(st.integers(0, 4))] = draw(NOT_FINITE | below_or_above)


def sigmas_that_do_not_fall(draw: Draw, message: Request) -> None:
    sigmas = draw(st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5))
    if all(later < earlier for earlier, later in itertools.pairwise(sigmas)):
        sigmas.reverse()
    four_steps(message).sigmas.extend(sigmas)


def no_noise_level(draw: Draw, message: Request) -> None:
    message.sampling.dynamics = draw(STOCHASTIC)
    message.sampling.ClearField("noise_level")


def a_wrong_noise_level(draw: Draw, message: Request) -> None:
    message.sampling.dynamics = draw(STOCHASTIC)
    message.sampling.noise_level = draw(NOT_FINITE | st.floats(max_value=-1e-300, allow_infinity=False))


def no_noise_with_a_gaussian(draw: Draw, message: Request) -> None:
    message.sampling.dynamics = draw(STOCHASTIC)
    message.sampling.log_prob_kind = pb.LOG_PROB_KIND_GAUSSIAN
    message.sampling.noise_level = 0


def too_much_noise_for_cps(draw: Draw, message: Request) -> None:
    message.sampling.dynamics = pb.DYNAMICS_CPS
    message.sampling.noise_level = draw(st.floats(min_value=1, exclude_min=True))


def ode_with_what_it_does_not_take(draw: Draw, message: Request) -> None:
    message.sampling.dynamics = pb.DYNAMICS_ODE
    match draw(st.integers(0, 2)):
        case 0:
            message.sampling.noise_level = draw(st.floats())
        case 1:
            message.sampling.log_prob_kind = draw(st.sampled_from([1, 2]))
        case _:
            message.sampling.stochastic_step_indices.SetInParent()


def wrong_stochastic_steps(draw: Draw, message: Request) -> None:
    four_steps(message).stochastic_step_indices.indices[:] = draw(bad_indices(4))


def an_unknown_log_prob_kind(draw: Draw, message: Request) -> None:
    message.sampling.log_prob_kind = draw(unknown(0, 1, 2))


def an_unknown_noise_mode(draw: Draw, message: Request) -> None:
    message.sampling.noise_mode = draw(unknown(0, 1, 2))


def a_size_that_does_not_divide(draw: Draw, message: Request) -> None:
    size = draw(st.just(0) | st.integers(1, UINT32).filter(lambda n: n % IMAGE_FACTS.size_multiple))
    setattr(message.pipeline, draw(st.sampled_from(["height", "width"])), size)


def too_many_pixels(draw: Draw, message: Request) -> None:
    message.pipeline.height = 16 * draw(st.integers(9, UINT32 // 16))
    message.pipeline.width = 16 * draw(st.integers(8, UINT32 // 16))


def frames_of_an_image(draw: Draw, message: Request) -> None:
    message.pipeline.num_frames = draw(st.integers(0, UINT32))


def a_wrong_guidance_scale(draw: Draw, message: Request) -> None:
    message.pipeline.guidance_scale = draw(NOT_FINITE | st.floats(max_value=-1e-300))


def an_argument_that_is_not_to_be_set(draw: Draw, message: Request) -> None:
    owned = st.sampled_from(["prompt", "latents", "generator", "sigmas", "height", "num_images_per_prompt", "self"])
    name = draw(owned | st.text(max_size=20).filter(lambda name: name not in IMAGE_FACTS.arguments))
    message.pipeline.arguments[name].int_value = draw(st.integers(-(1 << 63), (1 << 63) - 1))


def an_argument_of_another_kind(draw: Draw, message: Request) -> None:
    arguments = message.pipeline.arguments
    match draw(st.integers(0, 5)):
        case 0:
            arguments["clip_skip"].double_value = draw(st.floats())
        case 1:
            arguments["clip_skip"].string_value = draw(st.text(max_size=5))
        case 2:
            arguments["max_sequence_length"].bool_value = draw(st.booleans())
        case 3:
            arguments["prompt_2"].int_value = draw(st.integers(0, 5))
        case 4:
            arguments["mu"].double_value = draw(NOT_FINITE)
        case _:
            arguments[draw(st.sampled_from(sorted(IMAGE_FACTS.arguments)))].ClearField("kind")


def an_unknown_selection(draw: Draw, message: Request) -> None:
    message.output.latents_selection = draw(unknown(0, 1, 2, 3, 4))


def wrong_latents_indices(draw: Draw, message: Request) -> None:
    four_steps(message)
    message.output.latents_indices.indices[:] = draw(bad_indices(5))


def a_wire_dtype_that_is_not_served(draw: Draw, message: Request) -> None:
    message.output.latents_dtype = draw(st.integers(4, 8) | unknown(0, 1, 2, 3))


def an_unknown_media_format(draw: Draw, message: Request) -> None:
    message.output.media = draw(unknown(0, 1, 2, 3))


def an_event_size_out_of_range(draw: Draw, message: Request) -> None:
    small, large = st.integers(0, MIN_EVENT_BYTES - 1), st.integers(MAX_EVENT_BYTES + 1, UINT32)
    message.output.max_event_bytes = draw(small | large)


def a_wait_for_nothing(draw: Draw, message: Request) -> None:
    message.policy.ClearField("kind")
    message.policy.max_wait.seconds = draw(st.integers(-(1 << 63), (1 << 63) - 1))


def a_negative_wait(draw: Draw, message: Request) -> None:
    setattr(message.policy, draw(st.sampled_from(["exactly", "at_least"])), draw(SEEDS))
    if draw(st.booleans()):
        message.policy.max_wait.seconds = draw(st.integers(-(1 << 63), -1))
    else:
        message.policy.max_wait.nanos = draw(st.integers(-(1 << 31), -1))


MUTATIONS: tuple[Mutation, ...] = (
    no_prompts,
    too_many_prompts,
    no_samples,
    samples_and_a_range,
    a_range_of_none,
    a_range_beyond_the_top,
    too_many_samples,
    too_long_a_text,
    sequential_with_an_initial_seed,
    a_start_beyond_the_last_step,
    a_start_of_another_dtype,
    a_start_of_another_shape,
    a_start_of_another_length,
    a_start_with_an_offset,
    a_start_that_is_not_finite,
    dynamics_unknown,
    a_wrong_number_of_steps,
    a_wrong_number_of_sigmas,
    a_wrong_sigma,
    sigmas_that_do_not_fall,
    no_noise_level,
    a_wrong_noise_level,
    no_noise_with_a_gaussian,
    too_much_noise_for_cps,
    ode_with_what_it_does_not_take,
    wrong_stochastic_steps,
    an_unknown_log_prob_kind,
    an_unknown_noise_mode,
    a_size_that_does_not_divide,
    too_many_pixels,
    frames_of_an_image,
    a_wrong_guidance_scale,
    an_argument_that_is_not_to_be_set,
    an_argument_of_another_kind,
    an_unknown_selection,
    wrong_latents_indices,
    a_wire_dtype_that_is_not_served,
    an_unknown_media_format,
    an_event_size_out_of_range,
    a_wait_for_nothing,
    a_negative_wait,
)


@st.composite
def invalid_requests(draw: Draw) -> Request:
    """A valid request with one to three things wrong."""
    message = valid(draw(SEEDS))
    for mutation in draw(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3)):
        mutation(draw, message)
    return message


# -- what must hold of every refusal

STEP = re.compile(r"(?P<name>\w+)(?:\[(?P<position>\d+)\])?(?:\.|$)")
ARGUMENT = re.compile(r"pipeline\.arguments\[(?P<key>.*)\]", re.DOTALL)


def assert_names_a_field(message: Request, path: str) -> None:
    """Walk the path from the top of the request: every part of it exists there."""
    assert path
    if argument := ARGUMENT.fullmatch(path):
        assert argument["key"] in message.pipeline.arguments
        return
    at: Any = message
    while path:
        part = STEP.match(path)
        assert part, path
        assert part["name"] in at.DESCRIPTOR.fields_by_name
        at, path = getattr(at, part["name"]), path[part.end() :]
        if part["position"] is not None:
            assert int(part["position"]) < len(at)
            at = at[int(part["position"])]


def assert_refusal(message: Request, error: Refusal) -> None:
    """INVALID_ARGUMENT, naming the field, and with OVER_LIMIT by how much."""
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.domain == DOMAIN
    assert error.reason in ("INVALID_FIELD", "OVER_LIMIT")
    assert_names_a_field(message, error.field)
    assert error.message.startswith(f"{error.field}: ")
    if error.reason == "OVER_LIMIT":
        assert int(error.metadata["value"]) > int(error.metadata["limit"])
        assert error.metadata["limit_name"] in pb.Limits.DESCRIPTOR.fields_by_name


def test_what_the_mutations_start_from_is_valid() -> None:
    for seed in range(500):
        parse(valid(seed))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_mutation_alone_invalidates(mutation: Mutation) -> None:
    @settings(max_examples=20, **FIXED)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        message = valid(data.draw(SEEDS))
        mutation(data.draw, message)
        with pytest.raises(ServiceError) as caught:
            parse(message)
        assert_refusal(message, refusal_of(caught.value))

    check()


@pytest.mark.slow
@settings(max_examples=2000, **FIXED)
@given(invalid_requests())
def test_an_invalid_request_is_refused_and_nothing_else(message: Request) -> None:
    with pytest.raises(ServiceError) as caught:
        parse(message)
    assert_refusal(message, refusal_of(caught.value))


# -- over the wire


def test_the_server_has_the_arguments_that_the_mutations_know(service: RunningServer) -> None:
    facts = service.server.engine.facts
    assert IMAGE_FACTS.arguments.items() <= facts.arguments.items()
    assert (facts.size_multiple, facts.video) == (IMAGE_FACTS.size_multiple, False)
    assert facts.default_arguments == IMAGE_FACTS.default_arguments


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_server_refuses_invalid_requests_and_goes_on(count: int, stub: Any, client: RolloutClient) -> None:
    before = client.status()

    @settings(max_examples=count, **FIXED)
    @given(invalid_requests())
    def check(message: Request) -> None:
        assert_refusal(message, refused(stub, message))

    check()
    after = client.status()
    assert (after.pipeline_calls, after.engine_restarts) == (before.pipeline_calls, 0)
    assert_serves(client)


@st.composite
def broken_bytes(draw: Draw) -> bytes:
    """Bytes of any kind, or of a request that was cut or flipped."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    data = bytearray(request().SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


def test_a_server_outlives_any_bytes(channel: grpc.Channel, client: RolloutClient) -> None:
    generate = channel.unary_stream("/diffusion_rollout.v1.RolloutService/GenerateRollout")
    codes: set[grpc.StatusCode] = set()

    @settings(max_examples=150, **FIXED)
    @given(broken_bytes())
    def check(data: bytes) -> None:
        try:
            for response in generate(data, timeout=30):
                pb.GenerateRolloutResponse.FromString(response)
            codes.add(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            codes.add(error.code())

    check()
    assert codes - {grpc.StatusCode.OK}
    # Never INTERNAL or UNKNOWN, which would mean a bug.
    allowed = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
    assert codes <= allowed
    assert client.status().engine_restarts == 0
    assert_serves(client)
