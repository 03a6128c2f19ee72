"""Every field of a GenerateRolloutRequest: what is valid arrives in the spec, what is not is refused by its path."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_rollout.v1 import rollout_pb2 as pb

from rollout_service.config import MAX_EVENT_BYTES, MIN_EVENT_BYTES
from rollout_service.engine.spec import PromptSpec, RolloutSpec, SampleSpec
from rollout_service.models.loading import PipelineFacts
from rollout_service.rpc.errors import ServiceError
from tests.rpc.support import (
    BARE_FACTS,
    CONFIG,
    DOMAIN,
    IMAGE_FACTS,
    LATENTS_SHAPE,
    LIMITS,
    VIDEO_FACTS,
    Refusal,
    give_start,
    parse,
    refusal_of,
    request,
    start_state,
)

Fields = dict[str, str | tuple[str, ...]]
Case = tuple[Fields, Any]

TOO_LONG = "x" * 1001
SDE = "dynamics: DYNAMICS_SDE noise_level: 0.7"
ODE = "dynamics: DYNAMICS_ODE"


def spec_of(facts: PipelineFacts = IMAGE_FACTS, **fields: str | tuple[str, ...]) -> RolloutSpec:
    """The spec that a valid request arrives as."""
    return parse(request(**fields), facts).spec


def refusal(facts: PipelineFacts = IMAGE_FACTS, **fields: str | tuple[str, ...]) -> Refusal:
    """The refusal of an invalid request."""
    with pytest.raises(ServiceError) as caught:
        parse(request(**fields), facts)
    return refusal_of(caught.value)


def identify(value: object) -> str | None:
    """A readable test id for facts and fields."""
    if isinstance(value, PipelineFacts):
        return value.pipeline_class
    if isinstance(value, dict) and set(value) <= set(pb.GenerateRolloutRequest.DESCRIPTOR.fields_by_name):
        texts = ((name, text if isinstance(text, str) else " ".join(text)) for name, text in value.items())
        return ", ".join(f"{name}: {text}"[:60] for name, text in texts)
    return None


def latents(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = LATENTS_SHAPE) -> torch.Tensor:
    """Some x_k."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- valid


def test_the_smallest_request_takes_the_defaults() -> None:
    parsed = parse(request(sampling=ODE))
    assert parsed.max_event_bytes == CONFIG.default_event_bytes
    assert not parsed.start_latents
    spec = parsed.spec
    assert spec.rollout_id == "rollout-1"
    assert spec.prompts == (PromptSpec("a red circle", None),)
    assert spec.samples == (SampleSpec(0, 7, None, 0, False),)
    assert spec.num_steps == IMAGE_FACTS.default_steps
    assert spec.call_arguments == IMAGE_FACTS.default_arguments
    assert (spec.latents, spec.media, spec.conditioning) == ("all", "none", False)
    assert spec.buffer_bytes == CONFIG.stream_buffer_bytes
    assert spec.args.dynamics == "ode"
    assert spec.args.noise_level is spec.args.log_prob_kind is spec.args.stochastic_step_indices is None
    assert spec.args.sigmas is None
    assert spec.args.noise_mode == "keyed"
    assert spec.args.latents_dtype == torch.float32
    assert spec.args.debug == ()


PROMPT_CASES: list[Case] = [
    ({"prompts": ('prompt: "" samples { }',)}, [("", None)]),
    ({"prompts": ('prompt: "ünï 😀 \\000" samples { }',)}, [("ünï 😀 \0", None)]),
    ({"prompts": ('prompt: "a" negative_prompt: "" samples { }',)}, [("a", "")]),
    ({"prompts": ('prompt: "a" negative_prompt: "b" samples { }', "samples { }")}, [("a", "b"), ("", None)]),
    ({"prompts": (f'prompt: "{TOO_LONG[1:]}" samples {{ }}',)}, [(TOO_LONG[1:], None)]),
    ({"prompts": ("samples { }",) * 4}, [("", None)] * 4),
]


@pytest.mark.parametrize(("fields", "expected"), PROMPT_CASES, ids=identify)
def test_prompts_arrive(fields: Fields, expected: list[tuple[str, str | None]]) -> None:
    assert spec_of(**fields).prompts == tuple(PromptSpec(*prompt) for prompt in expected)


TOP = (1 << 64) - 1
SAMPLE_CASES: list[Case] = [
    ({"prompts": ("samples { }",)}, [(0, 0, None)]),
    ({"prompts": (f"samples {{ seed: {TOP} }} samples {{ seed: 5 }}",)}, [(0, TOP, None), (0, 5, None)]),
    ({"prompts": ("samples { seed: 5 initial_noise_seed: 0 }",)}, [(0, 5, 0)]),
    ({"prompts": (f"samples {{ initial_noise_seed: {TOP} }}",)}, [(0, 0, TOP)]),
    (
        {"prompts": ("seed_range { seed: 3 count: 2 }", "samples { seed: 9 }")},
        [(0, 3, None), (0, 4, None), (1, 9, None)],
    ),
    ({"prompts": (f"seed_range {{ seed: {TOP} count: 1 }}",)}, [(0, TOP, None)]),
    ({"prompts": (f"seed_range {{ seed: {TOP - 1} count: 2 }}",)}, [(0, TOP - 1, None), (0, TOP, None)]),
    ({"prompts": ("seed_range { count: 16 }",)}, [(0, seed, None) for seed in range(16)]),
    ({"prompts": ("samples { seed: 1 } samples { seed: 1 }",)}, [(0, 1, None), (0, 1, None)]),
]


@pytest.mark.parametrize(("fields", "expected"), SAMPLE_CASES, ids=identify)
def test_samples_arrive(fields: Fields, expected: list[tuple[int, int, int | None]]) -> None:
    assert spec_of(**fields).samples == tuple(SampleSpec(*sample, 0, False) for sample in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_start_states_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    given = latents(dtype)
    name = str(dtype).removeprefix("torch.").upper()
    parsed = parse(
        request(
            prompts=("samples { }", f"samples {{ }} samples {{ seed: 1 {start_state(3, given)} }}"),
            output=f"latents_dtype: DATA_TYPE_{name}",
        )
    )
    assert parsed.spec.args.latents_dtype == dtype
    assert [(s.start_step, s.starts_from_latents) for s in parsed.spec.samples] == [(0, False), (0, False), (3, True)]
    (index, arrived), *others = parsed.start_latents.items()
    assert index == 2
    assert not others
    assert arrived.dtype == dtype
    assert torch.equal(arrived, given)


def test_a_start_state_at_step_0_is_a_given_x_0() -> None:
    parsed = parse(request(prompts=(f"samples {{ {start_state(0, latents())} }}",)))
    assert parsed.spec.samples == (SampleSpec(0, 0, None, 0, True),)
    assert torch.equal(parsed.start_latents[0], latents())


def test_start_states_of_two_prompts_may_differ_in_shape() -> None:
    shapes = ((16, 8, 6), (12, 64))
    parsed = parse(request(prompts=tuple(f"samples {{ {start_state(1, latents(shape=shape))} }}" for shape in shapes)))
    assert [tuple(value.shape) for value in parsed.start_latents.values()] == list(shapes)


SAMPLING_CASES: list[Case] = [
    ({"sampling": f"{SDE} num_steps: 1"}, {"num_steps": 1}),
    ({"sampling": f"{SDE} num_steps: 50"}, {"num_steps": 50}),
    ({"sampling": f"{SDE} sigmas: [1, 0.3, 0]"}, {"num_steps": 2, "sigmas": (1.0, float(np.float32(0.3)), 0.0)}),
    ({"sampling": f"{SDE} num_steps: 1 sigmas: [0.5, 0.25]"}, {"num_steps": 1, "sigmas": (0.5, 0.25)}),
    ({"sampling": ODE}, {"dynamics": "ode", "noise_level": None, "resolved_log_prob_kind": None}),
    ({"sampling": SDE}, {"dynamics": "sde", "noise_level": 0.7, "resolved_log_prob_kind": "gaussian"}),
    ({"sampling": "dynamics: DYNAMICS_DANCE noise_level: 1.5"}, {"dynamics": "dance", "noise_level": 1.5}),
    ({"sampling": "dynamics: DYNAMICS_CPS noise_level: 1"}, {"dynamics": "cps", "noise_level": 1.0}),
    ({"sampling": "dynamics: DYNAMICS_CPS noise_level: 1"}, {"resolved_log_prob_kind": "squared_error"}),
    ({"sampling": "dynamics: DYNAMICS_CPS noise_level: 0"}, {"noise_level": 0.0}),
    ({"sampling": f"{SDE} log_prob_kind: LOG_PROB_KIND_GAUSSIAN"}, {"log_prob_kind": "gaussian"}),
    ({"sampling": f"{SDE} log_prob_kind: LOG_PROB_KIND_SQUARED_ERROR"}, {"log_prob_kind": "squared_error"}),
    (
        {"sampling": "dynamics: DYNAMICS_SDE noise_level: 0 log_prob_kind: LOG_PROB_KIND_SQUARED_ERROR"},
        {"noise_level": 0.0, "log_prob_kind": "squared_error"},
    ),
    ({"sampling": SDE}, {"stochastic_step_indices": None}),
    ({"sampling": f"{SDE} stochastic_step_indices {{ }}"}, {"stochastic_step_indices": ()}),
    ({"sampling": f"{SDE} stochastic_step_indices {{ indices: [0, 2, 3] }}"}, {"stochastic_step_indices": (0, 2, 3)}),
    ({"sampling": f"{SDE} noise_mode: NOISE_MODE_KEYED"}, {"noise_mode": "keyed"}),
    ({"sampling": f"{SDE} noise_mode: NOISE_MODE_SEQUENTIAL"}, {"noise_mode": "sequential"}),
]


@pytest.mark.parametrize(("fields", "expected"), SAMPLING_CASES, ids=identify)
def test_sampling_settings_arrive(fields: Fields, expected: dict[str, Any]) -> None:
    spec = spec_of(**fields)
    for name, value in expected.items():
        assert getattr(spec if name == "num_steps" else spec.args, name) == value


PIPELINE_CASES: list[tuple[PipelineFacts, str, dict[str, Any]]] = [
    (IMAGE_FACTS, "height: 128 width: 128", {"height": 128, "width": 128}),
    (IMAGE_FACTS, "height: 16", {"height": 16, "width": 48}),
    (IMAGE_FACTS, "guidance_scale: 0", {"guidance_scale": 0.0}),
    (IMAGE_FACTS, "guidance_scale: 1e300", {"guidance_scale": 1e300}),
    (IMAGE_FACTS, 'arguments { key: "clip_skip" value { int_value: -3 } }', {"clip_skip": -3}),
    (IMAGE_FACTS, 'arguments { key: "max_sequence_length" value { int_value: 9 } }', {"max_sequence_length": 9}),
    (VIDEO_FACTS, "num_frames: 33", {"num_frames": 33}),
    (VIDEO_FACTS, "num_frames: 1", {"num_frames": 1}),
    (VIDEO_FACTS, 'arguments { key: "flag" value { bool_value: false } }', {"flag": False}),
    (VIDEO_FACTS, 'arguments { key: "number" value { int_value: -4096 } }', {"number": -4096}),
    (VIDEO_FACTS, 'arguments { key: "ratio" value { double_value: 0.1 } }', {"ratio": 0.1}),
    (VIDEO_FACTS, 'arguments { key: "ratio" value { int_value: 2 } }', {"ratio": 2.0}),
    (VIDEO_FACTS, 'arguments { key: "text" value { string_value: "ü" } }', {"text": "ü"}),
    (VIDEO_FACTS, 'arguments { key: "either" value { string_value: "s" } }', {"either": "s"}),
    (VIDEO_FACTS, 'arguments { key: "either" value { int_value: 1 } }', {"either": 1}),
    (
        VIDEO_FACTS,
        'arguments { key: "number" value { int_value: 1 } } arguments { key: "flag" value { bool_value: true } }',
        {"number": 1, "flag": True},
    ),
    (BARE_FACTS, "", {}),
]


@pytest.mark.parametrize(("facts", "pipeline", "expected"), PIPELINE_CASES)
def test_pipeline_settings_arrive(facts: PipelineFacts, pipeline: str, expected: dict[str, Any]) -> None:
    arguments = spec_of(facts, pipeline=pipeline).call_arguments
    assert arguments == facts.default_arguments | expected
    assert {name: type(arguments[name]) for name in expected} == {name: type(v) for name, v in expected.items()}


def test_defaults_are_not_changed_by_a_request() -> None:
    before = dict(IMAGE_FACTS.default_arguments)
    spec_of(pipeline="height: 128 guidance_scale: 1")
    assert before == IMAGE_FACTS.default_arguments


OUTPUT_CASES: list[tuple[str, str, Any]] = [
    ("latents_selection: LATENTS_SELECTION_UNSPECIFIED", "latents", "all"),
    ("latents_selection: LATENTS_SELECTION_ALL", "latents", "all"),
    ("latents_selection: LATENTS_SELECTION_STOCHASTIC", "latents", "stochastic"),
    ("latents_selection: LATENTS_SELECTION_FINAL", "latents", "final"),
    ("latents_selection: LATENTS_SELECTION_NONE", "latents", "none"),
    ("latents_indices { }", "latents", ()),
    ("latents_indices { indices: [0, 3, 4] }", "latents", (0, 3, 4)),
    ("media: MEDIA_FORMAT_NONE", "media", "none"),
    ("media: MEDIA_FORMAT_RAW", "media", "raw"),
    ("media: MEDIA_FORMAT_PNG", "media", "png"),
    ("conditioning: true", "conditioning", True),
]


@pytest.mark.parametrize(("output", "name", "expected"), OUTPUT_CASES)
def test_output_settings_arrive(output: str, name: str, expected: Any) -> None:
    assert getattr(spec_of(output=output), name) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [("", ()), ("noise: true", ("noise",)), ("mean: true velocity: true", ("mean", "velocity"))],
)
def test_debug_tensors_arrive(output: str, expected: tuple[str, ...]) -> None:
    assert spec_of(output=output).args.debug == expected


@pytest.mark.parametrize("dtype", ["UNSPECIFIED", "FLOAT32", "BFLOAT16", "FLOAT16"])
def test_wire_dtypes_arrive(dtype: str) -> None:
    expected = torch.float32 if dtype == "UNSPECIFIED" else getattr(torch, dtype.lower())
    assert spec_of(output=f"latents_dtype: DATA_TYPE_{dtype}").args.latents_dtype == expected


@pytest.mark.parametrize("nbytes", [MIN_EVENT_BYTES, 5000, MAX_EVENT_BYTES])
def test_event_sizes_arrive(nbytes: int) -> None:
    assert parse(request(output=f"max_event_bytes: {nbytes}")).max_event_bytes == nbytes


@pytest.mark.parametrize("policy", ["exactly: 0", "at_least: 0", "exactly: 9 max_wait { seconds: 1 nanos: 5 }"])
def test_policy_requirements_are_well_formed(policy: str) -> None:
    parse(request(policy=policy))


def test_a_spec_survives_the_way_to_the_engine() -> None:
    spec = parse(
        request(
            prompts=('prompt: "ü" negative_prompt: "n" samples { seed: 18446744073709551615 initial_noise_seed: 3 }',),
            sampling=f"{SDE} sigmas: [1, 0.3, 0.1] stochastic_step_indices {{ indices: 1 }}",
            pipeline='guidance_scale: 1.5 arguments { key: "prompt_2" value { string_value: "ß" } }',
            output="latents_indices { indices: [1, 2] } noise: true latents_dtype: DATA_TYPE_BFLOAT16",
        )
    ).spec
    assert RolloutSpec.from_fields(json.loads(json.dumps(spec.to_fields()))) == spec


# -- refused: a value that is wrong


def prompt(text: str) -> Fields:
    """A request with one prompt."""
    return {"prompts": (text,)}


def argument(name: str, value: str) -> Fields:
    """A request with one pipeline argument."""
    return {"pipeline": f'arguments {{ key: "{name}" value {{ {value} }} }}'}


def sampling(text: str, steps: str = "num_steps: 4") -> Fields:
    """A request with sampling settings of its own."""
    return {"sampling": f"{text} {steps}"}


def started(state: str, **fields: str) -> Fields:
    """A request whose second prompt's second sample has a start state."""
    return {"prompts": ("samples { }", f"samples {{ }} samples {{ {state} }}"), **fields}


def broken_state(step_index: int = 1, **changes: Any) -> str:
    """A start state with the given fields of its tensor changed."""
    state = pb.StartState(step_index=step_index)
    tensor = state.latents
    tensor.dtype, tensor.offset = changes.get("dtype", 1), changes.get("offset", 0)
    tensor.shape.extend(changes.get("shape", LATENTS_SHAPE))
    tensor.data = changes.get("data", bytes(4 * math.prod(LATENTS_SHAPE)))
    return "start_state { " + str(state) + " }"


def poisoned(value: float, dtype: torch.dtype = torch.float32) -> str:
    """A start state with one value that is not finite."""
    wrong = latents(dtype)
    wrong.view(-1)[-1] = value
    return start_state(1, wrong)


STATE = "prompts[1].samples[1].start_state"
UNKNOWN_ENUMS = (99, -1, (1 << 31) - 1, -(1 << 31))
NOT_FINITE = ("nan", "inf", "-inf")

INVALID: list[tuple[PipelineFacts, Fields, str]] = [
    # prompts
    (IMAGE_FACTS, {"prompts": ()}, "prompts"),
    (IMAGE_FACTS, prompt('prompt: "a"'), "prompts[0].samples"),
    (IMAGE_FACTS, prompt("samples { } seed_range { count: 1 }"), "prompts[0].samples"),
    (IMAGE_FACTS, prompt("samples { } seed_range { }"), "prompts[0].samples"),
    (IMAGE_FACTS, {"prompts": ("samples { }", 'prompt: "b"')}, "prompts[1].samples"),
    (IMAGE_FACTS, prompt("seed_range { }"), "prompts[0].seed_range.count"),
    (IMAGE_FACTS, {"prompts": ("samples { }", "seed_range { seed: 1 }")}, "prompts[1].seed_range.count"),
    (IMAGE_FACTS, prompt(f"seed_range {{ seed: {TOP} count: 2 }}"), "prompts[0].seed_range.seed"),
    (IMAGE_FACTS, prompt(f"seed_range {{ seed: {TOP - 14} count: 16 }}"), "prompts[0].seed_range.seed"),
    (BARE_FACTS, prompt('negative_prompt: "" samples { }'), "prompts[0].negative_prompt"),
    (
        IMAGE_FACTS,
        prompt("samples { } samples { initial_noise_seed: 1 }") | sampling(f"{SDE} noise_mode: NOISE_MODE_SEQUENTIAL"),
        "prompts[0].samples[1].initial_noise_seed",
    ),
    # start states
    (IMAGE_FACTS, started(start_state(4, latents())), f"{STATE}.step_index"),
    (IMAGE_FACTS, started(start_state((1 << 32) - 1, latents())), f"{STATE}.step_index"),
    (IMAGE_FACTS, started(start_state(2, latents()), sampling=f"{ODE} sigmas: [1, 0.5, 0]"), f"{STATE}.step_index"),
    (IMAGE_FACTS, started("start_state { step_index: 1 }"), f"{STATE}.latents.dtype"),
    (IMAGE_FACTS, started(start_state(1, latents(torch.float16))), f"{STATE}.latents.dtype"),
    (IMAGE_FACTS, started(start_state(1, latents(torch.float64))), f"{STATE}.latents.dtype"),
    (
        IMAGE_FACTS,
        started(start_state(1, latents()), output="latents_dtype: DATA_TYPE_BFLOAT16"),
        f"{STATE}.latents.dtype",
    ),
    *((IMAGE_FACTS, started(broken_state(dtype=number)), f"{STATE}.latents.dtype") for number in UNKNOWN_ENUMS),
    (IMAGE_FACTS, started(broken_state(shape=())), f"{STATE}.latents.shape"),
    (IMAGE_FACTS, started(broken_state(shape=(), data=bytes(4))), f"{STATE}.latents.shape"),
    (IMAGE_FACTS, started(broken_state(shape=(16, 0, 6), data=b"")), f"{STATE}.latents.shape"),
    (IMAGE_FACTS, started(broken_state(shape=(1,) * 9, data=bytes(4))), f"{STATE}.latents.shape"),
    (IMAGE_FACTS, started(broken_state(shape=(16, 8, 7))), f"{STATE}.latents"),
    (IMAGE_FACTS, started(broken_state(shape=((1 << 32) - 1,) * 8)), f"{STATE}.latents"),
    (IMAGE_FACTS, started(broken_state(data=b"")), f"{STATE}.latents"),
    (IMAGE_FACTS, started(broken_state(data=bytes(4 * math.prod(LATENTS_SHAPE) - 1))), f"{STATE}.latents"),
    (IMAGE_FACTS, started(broken_state(data=bytes(4 * math.prod(LATENTS_SHAPE) + 4))), f"{STATE}.latents"),
    (IMAGE_FACTS, started(broken_state(offset=4)), f"{STATE}.latents"),
    (IMAGE_FACTS, started(broken_state(offset=TOP)), f"{STATE}.latents"),
    *((IMAGE_FACTS, started(poisoned(float(value))), f"{STATE}.latents") for value in NOT_FINITE),
    *(
        (
            IMAGE_FACTS,
            started(poisoned(float(value), torch.float16), output="latents_dtype: DATA_TYPE_FLOAT16"),
            f"{STATE}.latents",
        )
        for value in NOT_FINITE
    ),
    (
        IMAGE_FACTS,
        prompt(
            f"samples {{ {start_state(1, latents())} }} samples {{ }} "
            f"samples {{ {start_state(2, latents(shape=(16, 6, 8)))} }}"
        ),
        "prompts[0].samples[2].start_state.latents.shape",
    ),
    # sampling
    (IMAGE_FACTS, {"sampling": ""}, "sampling.dynamics"),
    (IMAGE_FACTS, sampling("noise_level: 0.7"), "sampling.dynamics"),
    *((IMAGE_FACTS, sampling(f"dynamics: {number}"), "sampling.dynamics") for number in UNKNOWN_ENUMS),
    (IMAGE_FACTS, sampling(ODE, "num_steps: 0"), "sampling.num_steps"),
    (IMAGE_FACTS, sampling(ODE, "sigmas: 1"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "num_steps: 4 sigmas: [1, 0]"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "num_steps: 1 sigmas: 1"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "sigmas: [0.5, 0.5, 0]"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "sigmas: [0.4, 0.5, 0]"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "sigmas: [1.1, 0.5, 0]"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "sigmas: [1, 0.5, -0.1]"), "sampling.sigmas"),
    (IMAGE_FACTS, sampling(ODE, "sigmas: [0.5, 0, -0.0]"), "sampling.sigmas"),
    *((IMAGE_FACTS, sampling(ODE, f"sigmas: [1, {value}, 0]"), "sampling.sigmas") for value in NOT_FINITE),
    *((IMAGE_FACTS, sampling(ODE, f"sigmas: [{value}, 0]"), "sampling.sigmas") for value in NOT_FINITE),
    (IMAGE_FACTS, sampling("dynamics: DYNAMICS_SDE"), "sampling.noise_level"),
    (IMAGE_FACTS, sampling("dynamics: DYNAMICS_DANCE"), "sampling.noise_level"),
    (IMAGE_FACTS, sampling("dynamics: DYNAMICS_CPS"), "sampling.noise_level"),
    *(
        (IMAGE_FACTS, sampling(f"dynamics: DYNAMICS_{dynamics} noise_level: {level}"), "sampling.noise_level")
        for dynamics in ("SDE", "DANCE", "CPS")
        for level in (*NOT_FINITE, "-0.1", "-1e300")
    ),
    (IMAGE_FACTS, sampling("dynamics: DYNAMICS_SDE noise_level: 0"), "sampling.noise_level"),
    (IMAGE_FACTS, sampling("dynamics: DYNAMICS_DANCE noise_level: 0"), "sampling.noise_level"),
    (IMAGE_FACTS, sampling("dynamics: DYNAMICS_CPS noise_level: 1.0000001"), "sampling.noise_level"),
    (
        IMAGE_FACTS,
        sampling("dynamics: DYNAMICS_CPS noise_level: 0 log_prob_kind: LOG_PROB_KIND_GAUSSIAN"),
        "sampling.noise_level",
    ),
    *((IMAGE_FACTS, sampling(f"{ODE} noise_level: {level}"), "sampling.noise_level") for level in ("0", "0.7", "nan")),
    (IMAGE_FACTS, sampling(f"{ODE} log_prob_kind: LOG_PROB_KIND_GAUSSIAN"), "sampling.log_prob_kind"),
    (IMAGE_FACTS, sampling(f"{ODE} log_prob_kind: LOG_PROB_KIND_SQUARED_ERROR"), "sampling.log_prob_kind"),
    (IMAGE_FACTS, sampling(f"{ODE} stochastic_step_indices {{ }}"), "sampling.stochastic_step_indices"),
    (IMAGE_FACTS, sampling(f"{ODE} stochastic_step_indices {{ indices: 0 }}"), "sampling.stochastic_step_indices"),
    *(
        (
            IMAGE_FACTS,
            sampling(f"{SDE} stochastic_step_indices {{ indices: {indices} }}"),
            "sampling.stochastic_step_indices",
        )
        for indices in ("4", "[0, 4]", "[1, 1]", "[2, 1]", "4294967295")
    ),
    *((IMAGE_FACTS, sampling(f"{SDE} log_prob_kind: {n}"), "sampling.log_prob_kind") for n in UNKNOWN_ENUMS),
    *((IMAGE_FACTS, sampling(f"{SDE} noise_mode: {n}"), "sampling.noise_mode") for n in UNKNOWN_ENUMS),
    # pipeline
    *((IMAGE_FACTS, {"pipeline": f"height: {n}"}, "pipeline.height") for n in (0, 8, 63, 72)),
    *((IMAGE_FACTS, {"pipeline": f"width: {n}"}, "pipeline.width") for n in (0, 8, 47, 4294967295)),
    (BARE_FACTS, {"pipeline": "height: 64"}, "pipeline.height"),
    (BARE_FACTS, {"pipeline": "width: 64"}, "pipeline.width"),
    (IMAGE_FACTS, {"pipeline": "num_frames: 1"}, "pipeline.num_frames"),
    (IMAGE_FACTS, {"pipeline": "num_frames: 0"}, "pipeline.num_frames"),
    *((VIDEO_FACTS, {"pipeline": f"num_frames: {n}"}, "pipeline.num_frames") for n in (0, 2, 4, 32)),
    *((IMAGE_FACTS, {"pipeline": f"guidance_scale: {n}"}, "pipeline.guidance_scale") for n in (*NOT_FINITE, "-0.1")),
    (BARE_FACTS, {"pipeline": "guidance_scale: 1"}, "pipeline.guidance_scale"),
    (IMAGE_FACTS, argument("no_such", "int_value: 1"), "pipeline.arguments[no_such]"),
    (IMAGE_FACTS, argument("", "int_value: 1"), "pipeline.arguments[]"),
    (IMAGE_FACTS, argument("__class__", "int_value: 1"), "pipeline.arguments[__class__]"),
    (BARE_FACTS, argument("clip_skip", "int_value: 1"), "pipeline.arguments[clip_skip]"),
    *(
        (IMAGE_FACTS, argument(name, value), f"pipeline.arguments[{name}]")
        for name, value in (
            ("prompt", 'string_value: "x"'),
            ("negative_prompt", 'string_value: "x"'),
            ("height", "int_value: 64"),
            ("num_frames", "int_value: 1"),
            ("guidance_scale", "double_value: 1"),
            ("num_inference_steps", "int_value: 4"),
            ("num_images_per_prompt", "int_value: 4"),
            ("latents", "int_value: 0"),
            ("generator", "int_value: 0"),
            ("output_type", 'string_value: "pil"'),
            ("return_dict", "bool_value: true"),
        )
    ),
    (IMAGE_FACTS, argument("clip_skip", ""), "pipeline.arguments[clip_skip]"),
    (IMAGE_FACTS, argument("clip_skip", "bool_value: true"), "pipeline.arguments[clip_skip]"),
    (IMAGE_FACTS, argument("clip_skip", "double_value: 1"), "pipeline.arguments[clip_skip]"),
    (IMAGE_FACTS, argument("clip_skip", 'string_value: "1"'), "pipeline.arguments[clip_skip]"),
    (IMAGE_FACTS, argument("prompt_2", "int_value: 1"), "pipeline.arguments[prompt_2]"),
    (VIDEO_FACTS, argument("flag", "int_value: 1"), "pipeline.arguments[flag]"),
    (VIDEO_FACTS, argument("ratio", "bool_value: true"), "pipeline.arguments[ratio]"),
    (VIDEO_FACTS, argument("ratio", 'string_value: "1"'), "pipeline.arguments[ratio]"),
    (VIDEO_FACTS, argument("either", "double_value: 1"), "pipeline.arguments[either]"),
    *((VIDEO_FACTS, argument("ratio", f"double_value: {n}"), "pipeline.arguments[ratio]") for n in NOT_FINITE),
    *((IMAGE_FACTS, argument("clip_skip", f"double_value: {n}"), "pipeline.arguments[clip_skip]") for n in NOT_FINITE),
    # output
    *((IMAGE_FACTS, {"output": f"latents_selection: {n}"}, "output.latents_selection") for n in (*UNKNOWN_ENUMS, 5)),
    *(
        (IMAGE_FACTS, {"output": f"latents_indices {{ indices: {indices} }}"}, "output.latents_indices")
        for indices in ("5", "[0, 5]", "[1, 1]", "[2, 1]", "4294967295")
    ),
    *(
        (IMAGE_FACTS, {"output": f"latents_dtype: {n}"}, "output.latents_dtype")
        for n in (*UNKNOWN_ENUMS, 4, 5, 6, 7, 8)
    ),
    *((IMAGE_FACTS, {"output": f"media: {n}"}, "output.media") for n in (*UNKNOWN_ENUMS, 4)),
    *(
        (IMAGE_FACTS, {"output": f"max_event_bytes: {n}"}, "output.max_event_bytes")
        for n in (0, 1, MIN_EVENT_BYTES - 1)
    ),
    # policy
    (IMAGE_FACTS, {"policy": "max_wait { seconds: 1 }"}, "policy.max_wait"),
    (IMAGE_FACTS, {"policy": "max_wait { }"}, "policy.max_wait"),
    (IMAGE_FACTS, {"policy": "exactly: 0 max_wait { seconds: -1 }"}, "policy.max_wait"),
    (IMAGE_FACTS, {"policy": "at_least: 0 max_wait { nanos: -1 }"}, "policy.max_wait"),
]


@pytest.mark.parametrize(("facts", "fields", "path"), INVALID, ids=identify)
def test_what_is_wrong_is_refused_by_its_path(facts: PipelineFacts, fields: Fields, path: str) -> None:
    error = refusal(facts, **fields)
    assert (error.code.name, error.reason, error.domain, error.field) == (
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        DOMAIN,
        path,
    )
    assert error.message.startswith(f"{path}: ")
    assert error.retry_after_seconds is None


# -- refused: larger than a limit

OVER: list[tuple[PipelineFacts, Fields, str, str, int]] = [
    (IMAGE_FACTS, {"prompts": ("samples { }",) * 5}, "prompts", "max_prompts", 5),
    (IMAGE_FACTS, prompt("samples { }" * 17), "prompts", "max_samples", 17),
    (IMAGE_FACTS, prompt("seed_range { count: 17 }"), "prompts", "max_samples", 17),
    (IMAGE_FACTS, prompt("seed_range { count: 4294967295 }"), "prompts", "max_samples", (1 << 32) - 1),
    (IMAGE_FACTS, {"prompts": ("seed_range { count: 9 }", "samples { }" * 8)}, "prompts", "max_samples", 17),
    (IMAGE_FACTS, prompt(f'prompt: "{TOO_LONG}" samples {{ }}'), "prompts[0].prompt", "max_prompt_bytes", 1001),
    (IMAGE_FACTS, prompt(f'prompt: "{"ü" * 501}" samples {{ }}'), "prompts[0].prompt", "max_prompt_bytes", 1002),
    (
        IMAGE_FACTS,
        {"prompts": ("samples { }", f'negative_prompt: "{TOO_LONG}" samples {{ }}')},
        "prompts[1].negative_prompt",
        "max_prompt_bytes",
        1001,
    ),
    (
        IMAGE_FACTS,
        argument("prompt_2", f'string_value: "{TOO_LONG}"'),
        "pipeline.arguments[prompt_2]",
        "max_prompt_bytes",
        1001,
    ),
    (IMAGE_FACTS, sampling(ODE, "num_steps: 51"), "sampling.num_steps", "max_steps", 51),
    (IMAGE_FACTS, sampling(ODE, "num_steps: 4294967295"), "sampling.num_steps", "max_steps", (1 << 32) - 1),
    (IMAGE_FACTS, sampling(ODE, "sigmas: 0 " * 52), "sampling.sigmas", "max_steps", 51),
    (IMAGE_FACTS, {"pipeline": "height: 144 width: 128"}, "pipeline.height", "max_pixels", 144 * 128),
    (IMAGE_FACTS, {"pipeline": "height: 4294967280"}, "pipeline.height", "max_pixels", 4294967280 * 48),
    (VIDEO_FACTS, {"pipeline": "num_frames: 37"}, "pipeline.num_frames", "max_frames", 37),
    (VIDEO_FACTS, {"pipeline": "num_frames: 4294967295"}, "pipeline.num_frames", "max_frames", (1 << 32) - 1),
]


def assert_over_limit(error: Refusal, path: str, limit: str, value: int, most: int) -> None:
    """A refusal with OVER_LIMIT, whose metadata say by how much."""
    assert (error.code.name, error.reason, error.field) == ("INVALID_ARGUMENT", "OVER_LIMIT", path)
    assert error.metadata == {"limit": str(most), "limit_name": limit, "value": str(value)}
    assert error.retry_after_seconds is None


@pytest.mark.parametrize(("facts", "fields", "path", "limit", "value"), OVER, ids=identify)
def test_what_is_over_a_limit_is_refused_with_the_limit(
    facts: PipelineFacts, fields: Fields, path: str, limit: str, value: int
) -> None:
    assert_over_limit(refusal(facts, **fields), path, limit, value, LIMITS[limit])


def test_the_pixels_of_a_request_that_gives_the_width_alone_are_a_fault_of_the_width() -> None:
    error = refusal(pipeline="width: 1600")
    assert_over_limit(error, "pipeline.width", "max_pixels", 64 * 1600, LIMITS["max_pixels"])


def test_events_beyond_the_upper_end_of_the_range_are_over_a_limit() -> None:
    """`GetServerInfo` lists `max_event_bytes` among the limits, beyond which OVER_LIMIT is promised."""
    for value in (MAX_EVENT_BYTES + 1, (1 << 32) - 1):
        error = refusal(output=f"max_event_bytes: {value}")
        assert_over_limit(error, "output.max_event_bytes", "max_event_bytes", value, MAX_EVENT_BYTES)


def test_a_request_of_too_many_bytes_is_over_a_limit() -> None:
    """`GetServerInfo` lists `max_request_bytes` among the limits, beyond which OVER_LIMIT is promised."""
    message = request()
    give_start(message.prompts[0].samples[0], 1, latents(shape=(16, 128, 129)))
    assert message.ByteSize() > LIMITS["max_request_bytes"]
    with pytest.raises(ServiceError) as caught:
        parse(message)
    error = refusal_of(caught.value)
    assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "OVER_LIMIT")
    assert error.metadata["limit_name"] == "max_request_bytes"
    assert error.metadata["limit"] == str(LIMITS["max_request_bytes"])


@pytest.mark.parametrize("wait", ["seconds: 1 nanos: 1000000000", "seconds: 315576000001"])
def test_a_wait_that_is_no_valid_duration_is_refused(wait: str) -> None:
    """google.protobuf.Duration: nanos below 1e9, seconds within 10,000 years."""
    error = refusal(policy=f"exactly: 0 max_wait {{ {wait} }}")
    assert (error.reason, error.field) == ("INVALID_FIELD", "policy.max_wait")
