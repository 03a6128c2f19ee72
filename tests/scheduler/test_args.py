from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.scheduler import DYNAMICS, RolloutArgs, RolloutArgsError, as_float32, transition
from rollout_service.scheduler.args import DEBUG_TENSORS, validate_indices, validate_sigmas
from tests.support import reference

SIGMAS = as_float32((1.0, 0.7, 0.4, 0.1, 0.0))


def sde(**changes: Any) -> RolloutArgs:
    """Valid settings with changes."""
    return RolloutArgs(**{"dynamics": "sde", "noise_level": 0.7, **changes})


VALID = [
    sde(),
    sde(dynamics="dance", noise_level=3.0),
    sde(dynamics="cps", noise_level=1.0),
    sde(dynamics="cps", noise_level=1e-6, log_prob_kind="gaussian"),
    sde(noise_level=0.0, log_prob_kind="squared_error"),
    sde(dynamics="cps", noise_level=0.0),
    sde(dynamics="dance", noise_level=0.0, log_prob_kind="squared_error"),
    RolloutArgs(dynamics="ode"),
    RolloutArgs(dynamics="ode", sigmas=SIGMAS, latents_dtype=torch.float16, debug=("mean", "velocity")),
    sde(stochastic_step_indices=()),
    sde(stochastic_step_indices=(0, 3)),
    sde(sigmas=SIGMAS, stochastic_step_indices=(0, 1, 2, 3)),
    sde(noise_mode="sequential", debug=DEBUG_TENSORS),
    *(sde(latents_dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]

INVALID: list[tuple[RolloutArgs, int | None, str, str]] = [
    # (settings, num_steps, field, what the message says to pass instead)
    (RolloutArgs(dynamics="euler"), None, "dynamics", "'euler' is unknown; pass one of ode, sde, dance, cps"),
    (sde(noise_mode="philox"), None, "noise_mode", "'philox' is unknown; pass one of keyed, sequential"),
    (sde(latents_dtype=torch.float64), None, "latents_dtype", "torch.float64 .* pass float32, bfloat16 or float16"),
    (sde(latents_dtype=torch.int8), None, "latents_dtype", "torch.int8 .* pass float32, bfloat16 or float16"),
    (sde(debug=("noise", "x0")), None, "debug", "'x0' is unknown; pass one of noise, mean, velocity"),
    (RolloutArgs("ode", noise_level=0.7), None, "noise_level", "leave it out, or pass sde, dance or cps"),
    (RolloutArgs("ode", noise_level=0.0), None, "noise_level", "leave it out"),
    (RolloutArgs("ode", log_prob_kind="gaussian"), None, "log_prob_kind", "leave it out"),
    (RolloutArgs("ode", stochastic_step_indices=()), None, "stochastic_step_indices", "leave it out"),
    (sde(log_prob_kind="laplace"), None, "log_prob_kind", "pass one of gaussian, squared_error"),
    *(
        (sde(dynamics=name, noise_level=None), None, "noise_level", f"needed by {name}; pass .*, for example 0.7")
        for name in ("sde", "dance", "cps")
    ),
    *(
        (sde(dynamics=name, noise_level=level), None, "noise_level", f"{level} .* pass more than 0, or dynamics ode")
        for name in ("sde", "dance")
        for level in (0.0, -0.1, math.inf, math.nan)
    ),
    (sde(noise_level=-0.1, log_prob_kind="squared_error"), None, "noise_level", "pass 0 or more, or dynamics ode"),
    (sde(dynamics="cps", noise_level=1.01), None, "noise_level", "pass 0 or more and at most 1, or dynamics ode"),
    (sde(dynamics="cps", noise_level=-0.1), None, "noise_level", "pass 0 or more and at most 1, or dynamics ode"),
    (
        sde(dynamics="cps", noise_level=0.0, log_prob_kind="gaussian"),
        None,
        "noise_level",
        "pass more than 0 and at most 1, or dynamics ode",
    ),
    (sde(sigmas=SIGMAS), 5, "sigmas", "5 given for 5 steps; pass 6"),
    (sde(sigmas=SIGMAS), 3, "sigmas", "5 given for 3 steps; pass 4"),
    (sde(sigmas=()), None, "sigmas", r"0 given; pass T\+1 noise levels for T >= 1 steps"),
    (sde(sigmas=(1.0,)), None, "sigmas", r"1 given; pass T\+1 noise levels for T >= 1 steps"),
    (sde(sigmas=(1.5, 0.5)), None, "sigmas", "value 0 is 1.5; pass noise levels from 0 to 1"),
    (sde(sigmas=(1.0, -0.5)), None, "sigmas", "value 1 is -0.5; pass noise levels from 0 to 1"),
    (sde(sigmas=(1.0, math.nan, 0.0)), None, "sigmas", "value 1 is nan; pass noise levels from 0 to 1"),
    (sde(sigmas=(math.inf, 0.0)), None, "sigmas", "value 0 is inf; pass noise levels from 0 to 1"),
    (sde(sigmas=(1.0, 0.5, 0.5, 0.0)), None, "sigmas", "value 2 .* is not below value 1; pass a decreasing schedule"),
    (sde(sigmas=(0.0, 0.5, 1.0)), None, "sigmas", "value 1 .* is not below value 0; pass a decreasing schedule"),
    (sde(sigmas=(1.0, 0.7, 0.0)), None, "sigmas", r"value 1 \(0.7\) is not an fp32 value; round it first \(as_float32"),
    (sde(stochastic_step_indices=(0, 4)), 4, "stochastic_step_indices", "4 is out of range; pass indices from 0 to 3"),
    (sde(stochastic_step_indices=(-1,)), 4, "stochastic_step_indices", "-1 is out of range; pass indices from 0 to 3"),
    (sde(stochastic_step_indices=(-1,)), None, "stochastic_step_indices", "-1 .*; pass indices from 0 or more"),
    (
        sde(stochastic_step_indices=(0, 4), sigmas=SIGMAS),
        None,
        "stochastic_step_indices",
        "4 is out of range; pass indices from 0 to 3",
    ),
    (
        sde(stochastic_step_indices=(1, 1)),
        4,
        "stochastic_step_indices",
        "1 comes after 1; pass each index once, in order",
    ),
    (
        sde(stochastic_step_indices=(2, 0)),
        4,
        "stochastic_step_indices",
        "0 comes after 2; pass each index once, in order",
    ),
]


@pytest.mark.parametrize("args", VALID, ids=str)
def test_valid(args: RolloutArgs) -> None:
    args.validate()
    args.validate(4)


@pytest.mark.parametrize(("args", "num_steps", "field", "hint"), INVALID)
def test_invalid_names_the_field_and_says_what_to_pass(
    args: RolloutArgs, num_steps: int | None, field: str, hint: str
) -> None:
    with pytest.raises(RolloutArgsError, match=f"^{field}: .*{hint}") as raised:
        args.validate(num_steps)
    assert isinstance(raised.value, ValueError)
    assert raised.value.field == field
    assert str(raised.value) == f"{field}: {raised.value.problem}"


def test_defaults_need_a_noise_level() -> None:
    with pytest.raises(RolloutArgsError, match=r"noise_level: needed by sde; pass more than 0, for example 0\.7"):
        RolloutArgs().validate()


def test_settings_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sde().noise_level = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dynamics", "given_kind", "resolved"),
    [
        ("ode", None, None),
        ("sde", None, "gaussian"),
        ("dance", None, "gaussian"),
        ("cps", None, "squared_error"),
        ("sde", "squared_error", "squared_error"),
        ("cps", "gaussian", "gaussian"),
    ],
)
def test_log_prob_kind_defaults_to_the_references(dynamics: str, given_kind: str | None, resolved: str | None) -> None:
    assert RolloutArgs(dynamics, log_prob_kind=given_kind).resolved_log_prob_kind == resolved


@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_noise_std_is_that_of_the_transition(dynamics: str) -> None:
    args = sde(dynamics=dynamics)
    for step, (sigma, sigma_next) in enumerate(itertools.pairwise(SIGMAS)):
        std = args.noise_std(SIGMAS, step)
        x = torch.ones(1, 1)
        assert std == transition(dynamics, x, x, sigma, sigma_next, SIGMAS[1], 0.7)[1].item()
        exact = reference.mean_and_std(dynamics, x, x, sigma, sigma_next, SIGMAS[1], 0.7)[1]
        assert std == pytest.approx(exact, rel=1e-7)
        assert (std,) == as_float32((std,))


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (RolloutArgs("ode"), ()),
        (sde(), (0, 1, 2, 3)),
        (sde(dynamics="dance"), (0, 1, 2, 3)),
        (sde(dynamics="cps"), (0, 1, 2)),  # cps to sigma 0 injects nothing
        (sde(stochastic_step_indices=(1, 3)), (1, 3)),
        (sde(dynamics="cps", stochastic_step_indices=(1, 3)), (1,)),
        (sde(stochastic_step_indices=()), ()),
        (sde(noise_level=0.0, log_prob_kind="squared_error"), ()),
    ],
    ids=str,
)
def test_stochastic_steps(args: RolloutArgs, steps: tuple[int, ...]) -> None:
    assert args.stochastic_steps(SIGMAS) == steps
    assert all(args.noise_std(SIGMAS, step) == 0.0 for step in set(range(4)) - set(steps))


def parse(*command_line: str) -> RolloutArgs:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    assert RolloutArgs.add_cli_args(parser) is parser
    return RolloutArgs.from_cli_args(parser.parse_args(command_line))


def command_line(args: RolloutArgs) -> list[str]:
    """The settings as a user would type them, defaults left out."""
    words: list[str] = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value is None or value == RolloutArgs.__dataclass_fields__[field.name].default:
            continue
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{field.name.replace('_', '-')}", *(str(item).removeprefix("torch.") for item in values)]
    return words


@pytest.mark.parametrize("args", VALID, ids=str)
def test_command_line_round_trip(args: RolloutArgs) -> None:
    assert parse("--model", "somewhere", *command_line(args)) == args


def test_command_line_rounds_sigmas_to_fp32() -> None:
    args = parse("--noise-level", "0.7", "--sigmas", "1", "0.7", "0.4", "0.1", "0")
    assert args == sde(sigmas=SIGMAS)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "noise_level"),
        (["--dynamics", "ode", "--noise-level", "0.7"], "noise_level"),
        (["--noise-level", "0.7", "--sigmas", "0.5", "1"], "sigmas"),
        (["--noise-level", "0.7", "--stochastic-step-indices", "2", "1"], "stochastic_step_indices"),
    ],
)
def test_command_line_is_validated(words: list[str], field: str) -> None:
    with pytest.raises(RolloutArgsError) as raised:
        parse(*words)
    assert raised.value.field == field


@pytest.mark.parametrize(
    "words",
    [
        ["--dynamics", "euler"],
        ["--log-prob-kind", "laplace"],
        ["--noise-mode", "philox"],
        ["--latents-dtype", "float64"],
        ["--debug", "x0"],
    ],
)
def test_command_line_choices(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--noise-level", "0.7", *words)
    assert f"argument {words[0]}: invalid choice" in capsys.readouterr().err


def test_command_line_help_names_every_setting() -> None:
    text = RolloutArgs.add_cli_args(argparse.ArgumentParser()).format_help()
    for field in dataclasses.fields(RolloutArgs):
        assert f"--{field.name.replace('_', '-')}" in text
    assert all(name in text for name in DYNAMICS)


@given(st.lists(st.floats(0, 1), max_size=8))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_as_float32_is_exact_and_idempotent(values: list[float]) -> None:
    rounded = as_float32(tuple(values))
    assert list(rounded) == torch.tensor(values, dtype=torch.float64).float().tolist()
    assert as_float32(rounded) == rounded


def test_sigmas_accepts_the_extremes() -> None:
    for sigmas in ((1.0, 0.0), (1, 0), as_float32((1.0, 1 - 2**-24, 2**-149, 0.0)), as_float32((0.5, 0.25))):
        validate_sigmas(sigmas)


def test_real_schedules_are_valid_though_they_do_not_survive_a_round_trip_through_timesteps() -> None:
    """A timestep is sigma * 1000 rounded to fp32; dividing it by 1000 does not always give sigma back.

    So sigmas, not timesteps, are what a schedule is stored and looked up by.
    """
    total = lost = 0
    for shift, steps in itertools.product((1.0, 3.0, 5.0), range(2, 51, 4)):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(steps)
        sigmas = tuple(scheduler.sigmas.tolist())
        validate_sigmas(sigmas)
        assert as_float32(sigmas) == sigmas
        total += steps
        lost += int((scheduler.timesteps / 1000 != scheduler.sigmas[:-1]).sum())
    assert 0 < lost < total


def test_indices_without_a_known_end() -> None:
    validate_indices("stochastic_step_indices", (0, 10**6), None)
    with pytest.raises(RolloutArgsError, match="steps: 3 comes after 5"):
        validate_indices("steps", (5, 3), None)
