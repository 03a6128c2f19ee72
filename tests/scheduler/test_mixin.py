from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from rollout_service.scheduler import (
    DYNAMICS,
    LOG_PROB_KINDS,
    NoiseSource,
    RolloutArgs,
    RolloutArgsError,
    RolloutFlowMatchEulerDiscreteScheduler,
    StepRecord,
    as_float32,
    clone_pipeline,
    log_prob,
    rollout_scheduler,
    transition,
)
from rollout_service.scheduler.args import DEBUG_TENSORS
from rollout_service.scheduler.pipeline import StartLatentsError
from tests.support import reference
from tests.support.reference import relative_error
from tests.support.tiny_pipelines import FAMILIES, build_wan

from .conftest import LoadPipeline
from .support import (
    SEEDS,
    SETTINGS,
    SIGMAS,
    STEPS,
    Run,
    assert_same_records,
    call_arguments,
    pinned,
    plain,
    replay,
    rollout,
    rollout_set,
    scheduler_set,
    x_0_generators,
)

Scheduler = RolloutFlowMatchEulerDiscreteScheduler
WIRE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOG_PROB_TOLERANCE = 1e-5
"""Relative to max(1, |value|)."""


def from_config(scheduler: FlowMatchEulerDiscreteScheduler) -> Scheduler:
    return Scheduler.from_config(scheduler.config)


def with_debug(args: RolloutArgs, **changes: Any) -> RolloutArgs:
    return dataclasses.replace(args, debug=DEBUG_TENSORS, **changes)


def run_alone(scheduler: Scheduler, x: Tensor, slope: float = 0.3) -> Tensor:
    """The loop of a pipeline whose velocity is ``slope`` times the latents."""
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        (x,) = scheduler.step(slope * x, t, x, return_dict=False)
    return x


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- off ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_off_is_the_scheduler_of_diffusers_bit_for_bit(load_pipeline: LoadPipeline, name: str) -> None:
    pipe = load_pipeline(name)
    expected = plain(pipe, name)
    own_schedule = pipe.scheduler.sigmas.clone(), pipe.scheduler.timesteps.clone()
    scheduler = from_config(pipe.scheduler)
    assert {**scheduler.config, "_class_name": None} == {**pipe.scheduler.config, "_class_name": None}

    def assert_off() -> None:
        with scheduler_set(pipe, scheduler):
            assert torch.equal(plain(pipe, name), expected)
        assert torch.equal(scheduler.sigmas, own_schedule[0])
        assert torch.equal(scheduler.timesteps, own_schedule[1])
        assert scheduler.rollout_records == []

    assert_off()
    with scheduler_set(pipe, scheduler):
        noise = scheduler.prepare_rollout(dataclasses.replace(SETTINGS["sde"], sigmas=SIGMAS), SEEDS)
        changed = plain(pipe, name, generator=noise.initial_generators())
    assert not torch.equal(changed, expected)
    assert len(scheduler.rollout_records) == STEPS
    scheduler.release_rollout_resources()
    assert_off()


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize(
    "config", [{}, {"shift": 3.0}, {"stochastic_sampling": True}, {"use_karras_sigmas": True}], ids=str
)
def test_off_step_is_the_parents(config: dict[str, Any], dtype: torch.dtype) -> None:
    parent, ours = FlowMatchEulerDiscreteScheduler(**config), Scheduler(**config)
    for scheduler in (parent, ours):
        scheduler.set_timesteps(STEPS)
    x = normal(2, 16, 4, 4).to(dtype)
    for t in parent.timesteps:
        (expected,) = parent.step(x * 0.3, t, x, generator=torch.Generator().manual_seed(1), return_dict=False)
        actual = ours.step(x * 0.3, t, x, generator=torch.Generator().manual_seed(1)).prev_sample
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        assert ours.step_index == parent.step_index
        x = expected


def test_off_passes_every_option_of_the_parents_on() -> None:
    parent, ours = FlowMatchEulerDiscreteScheduler(), Scheduler()
    per_token = torch.tensor([[800.0, 500.0, 0.0]]).expand(2, 3)
    x, v = normal(2, 3, 8), normal(2, 3, 8, seed=1)
    results = []
    for scheduler in (parent, ours):
        scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
        (result,) = scheduler.step(v, scheduler.timesteps[0], x, per_token_timesteps=per_token, return_dict=False)
        results.append(result)
    assert torch.equal(*results)
    assert not torch.equal(results[0], x)


# --- a rollout with ode is the plain pipeline -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_ode_over_a_clone_is_the_plain_pipeline_bit_for_bit(
    load_pipeline: LoadPipeline, name: str, dtype: torch.dtype
) -> None:
    pipe = load_pipeline(name, dtype)
    made = rollout(pipe, name, RolloutArgs("ode", latents_dtype=dtype))
    # Wan draws x_0 in float32 whatever its dtype, and the wire rounds it: its plain pipeline gets the rounded x_0.
    changes = {"latents": made.latents[0].float()} if (name, dtype) == ("wan", torch.bfloat16) else {}
    expected = plain(pipe, name, **changes)
    assert made.output.dtype == expected.dtype
    assert torch.equal(made.output, expected)
    assert {record.next_sample.dtype for record in made.records} == {dtype}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in FAMILIES
        for dtype in (torch.float32, torch.bfloat16)
        # Left out: Wan's pipeline hands float32 latents to the first step whatever its dtype, and only a clone rounds
        # them to the wire dtype; in bfloat16 the plain pipeline goes on in another precision than the rollout.
        if (name, dtype) != ("wan", torch.bfloat16)
    ],
    ids=str,
)
def test_ode_with_the_scheduler_set_is_the_plain_pipeline_bit_for_bit(
    load_pipeline: LoadPipeline, name: str, dtype: torch.dtype
) -> None:
    pipe = load_pipeline(name, dtype)
    expected = plain(pipe, name)
    for latents_dtype in (dtype, None):
        made = rollout_set(pipe, name, RolloutArgs("ode", latents_dtype=latents_dtype))
        assert made.output.dtype == expected.dtype
        assert torch.equal(made.output, expected)
        assert {record.next_sample.dtype for record in made.records} == {dtype}


@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_noise_level_zero_is_ode_exactly(load_pipeline: LoadPipeline, dynamics: str) -> None:
    pipe = load_pipeline("flux")
    made = rollout(pipe, "flux", RolloutArgs(dynamics, 0.0, log_prob_kind="squared_error"))
    expected = rollout(pipe, "flux", SETTINGS["ode"])
    assert torch.equal(made.output, expected.output)
    assert_same_records(made.records, expected.records)
    assert made.log_probs == {}


# --- a plain diffusers script ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_script_of_the_docstring(load_pipeline: LoadPipeline, name: str) -> None:
    pipe = load_pipeline(name)
    scheduler = from_config(pipe.scheduler)
    with scheduler_set(pipe, scheduler):
        noise = scheduler.prepare_rollout(SETTINGS["sde"], seeds=SEEDS)
        pipe(**call_arguments(name), generator=noise.initial_generators())
        log_probs = scheduler.collect_rollout_log_probs()
        assert log_probs.shape == (len(SEEDS), STEPS)
        assert log_probs.dtype == torch.float32
        assert log_probs.isfinite().all()
        records = scheduler.rollout_records
        assert torch.equal(log_probs, torch.stack([record.log_prob for record in records], 1))
        scheduler.release_rollout_resources()
    assert scheduler.rollout_records == []
    with pytest.raises(RuntimeError, match="no recorded steps"):
        scheduler.collect_rollout_log_probs()
    assert_same_records(records, rollout(pipe, name, SETTINGS["sde"]).records)


def test_collected_log_probs_leave_deterministic_steps_out() -> None:
    for args, scored in (
        (SETTINGS["ode"], 0),
        (SETTINGS["cps"], STEPS - 1),
        (dataclasses.replace(SETTINGS["sde"], stochastic_step_indices=(1, 3)), 2),
    ):
        scheduler = Scheduler()
        scheduler.prepare_rollout(args, SEEDS)
        run_alone(scheduler, normal(2, 16, 4, 4))
        assert scheduler.collect_rollout_log_probs().shape == (2, scored)


def test_records_go_to_the_sink_as_they_are_made() -> None:
    scheduler, records = Scheduler(), []
    scheduler.prepare_rollout(SETTINGS["sde"], SEEDS, sink=records.append)
    scheduler.set_timesteps(STEPS)
    x = normal(2, 16, 4, 4)
    for made, t in enumerate(scheduler.timesteps, start=1):
        x = scheduler.step(0.3 * x, t, x).prev_sample
        assert len(records) == made
        assert torch.equal(records[-1].next_sample, x)
    assert scheduler.rollout_records == []
    with pytest.raises(RuntimeError, match="no recorded steps"):
        scheduler.collect_rollout_log_probs()


# --- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_pinned_sigmas_are_used_verbatim(load_pipeline: LoadPipeline, name: str) -> None:
    """No second shift, though every family's scheduler config has one, and whatever number of steps is given."""
    pipe = load_pipeline(name)
    timesteps: list[Tensor] = []

    def run(component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
        timesteps.append(arguments["timestep"][0])
        return module(**arguments)

    args = RolloutArgs("ode", sigmas=SIGMAS, debug=("velocity",))
    made = rollout(pipe, name, args, run=run, steps=STEPS + 5)
    assert made.scheduler.rollout_sigmas == SIGMAS
    assert made.scheduler.rollout_steps == tuple(range(STEPS))
    assert made.scheduler.sigmas.tolist() == list(SIGMAS)
    assert [(record.sigma, record.sigma_next) for record in made.records] == list(itertools.pairwise(SIGMAS))
    for record in made.records:
        assert torch.equal(record.next_sample, euler_step(record))
    # The denoiser saw the same noise levels (some families divide the timestep by 1000 again).
    seen = torch.stack(timesteps) / (1 if max(timesteps) <= 1 else 1000)
    calls_per_step = len(seen) // STEPS
    torch.testing.assert_close(seen, torch.tensor(SIGMAS[:-1]).repeat_interleave(calls_per_step), rtol=1e-6, atol=0)

    # The config does shift: unpinned, the same sigmas come out as others.
    shifting = rollout_scheduler(pipe)
    shifting.set_timesteps(sigmas=list(SIGMAS[:-1]), mu=0.9 if shifting.config.use_dynamic_shifting else None)
    assert not torch.allclose(shifting.sigmas, torch.tensor(SIGMAS))


@pytest.mark.parametrize("name", FAMILIES)
def test_pinning_the_schedule_that_was_run_changes_nothing(load_pipeline: LoadPipeline, name: str) -> None:
    pipe = load_pipeline(name)
    made = rollout(pipe, name, SETTINGS["cps"])
    again = rollout(pipe, name, pinned(SETTINGS["cps"], made))
    assert torch.equal(again.output, made.output)
    assert_same_records(again.records, made.records)


def test_sigmas_that_share_a_timestep_stay_apart() -> None:
    """Two neighbouring fp32 sigmas can round to one timestep, in which the parent looks its position up."""
    near = torch.tensor(0.75)
    for _ in range(100):
        below = torch.nextafter(near, torch.tensor(0.0))
        if near * 1000 == below * 1000:
            break
        near = below
    sigmas = (1.0, near.item(), below.item(), 0.25, 0.0)
    scheduler = Scheduler()
    scheduler.prepare_rollout(RolloutArgs("ode", sigmas=sigmas), SEEDS)
    run_alone(scheduler, normal(2, 16, 4, 4))
    assert scheduler.timesteps[1] == scheduler.timesteps[2]
    assert [record.step_index for record in scheduler.rollout_records] == [0, 1, 2, 3]
    assert tuple(record.sigma for record in scheduler.rollout_records) == sigmas[:-1]
    assert scheduler.rollout_sigmas == sigmas


def test_set_timesteps_reports_the_steps_that_remain() -> None:
    scheduler = Scheduler(shift=3.0)
    scheduler.prepare_rollout(dataclasses.replace(SETTINGS["sde"], sigmas=SIGMAS), SEEDS, start_step=1)
    scheduler.set_timesteps(STEPS)
    assert scheduler.num_inference_steps == 3
    assert scheduler.sigmas.tolist() == list(SIGMAS[1:])
    assert torch.equal(scheduler.timesteps, torch.tensor(SIGMAS[1:-1]) * 1000)
    assert scheduler.rollout_sigmas == SIGMAS
    assert scheduler.rollout_steps == (1, 2, 3)


def test_step_index_counts_the_steps_of_this_call() -> None:
    scheduler, x = Scheduler(), normal(2, 16, 4, 4)
    for _ in range(2):
        scheduler.prepare_rollout(dataclasses.replace(SETTINGS["sde"], sigmas=SIGMAS), SEEDS, start_step=1)
        scheduler.set_timesteps(STEPS)
        assert scheduler.step_index is None
        for made, t in enumerate(scheduler.timesteps, start=1):
            scheduler.step(0.3 * x, t, x)
            assert scheduler.step_index == made


@pytest.mark.parametrize("start_step", [0, 1])
def test_sigma_max_is_the_second_sigma_of_the_full_schedule(start_step: int) -> None:
    """Also in a later step that is within the tolerance of 1, and in a rollout that starts there."""
    sigmas = as_float32((1.0, 0.99995, 0.5, 0.0))
    scheduler = Scheduler()
    scheduler.prepare_rollout(with_debug(SETTINGS["sde"], sigmas=sigmas), SEEDS, start_step=start_step)
    run_alone(scheduler, normal(2, 16, 4, 4))
    record = next(record for record in scheduler.rollout_records if record.step_index == 1)
    assert record.mean is not None
    assert record.velocity is not None
    mean, std = reference.mean_and_std("sde", record.sample, record.velocity, *sigmas[1:3], sigmas[1], 0.7)
    assert record.noise_std == pytest.approx(std, rel=1e-7)
    assert relative_error(record.mean, mean) < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_the_wire_dtype_does_not_round_the_timesteps(load_pipeline: LoadPipeline, name: str) -> None:
    """Some pipelines cast the timestep to the dtype of the latents, so these are carried in the model's."""
    seen: dict[torch.dtype, list[Tensor]] = {}
    for wire in (torch.float32, torch.bfloat16):
        seen[wire] = []

        def run(component: str, module: nn.Module, arguments: dict[str, Any], wire: torch.dtype = wire) -> Any:
            seen[wire].append(arguments["timestep"])
            return module(**arguments)

        args = RolloutArgs("ode", sigmas=as_float32((1.0, 0.7, 0.0)), latents_dtype=wire)
        rollout(load_pipeline(name), name, args, run=run)
    assert torch.equal(torch.stack(seen[torch.bfloat16]), torch.stack(seen[torch.float32]))


def test_unipc_wan_gets_a_flow_euler_scheduler_with_its_shift(load_pipeline: LoadPipeline) -> None:
    pipe = build_wan(unipc=True)
    pipe.set_progress_bar_config(disable=True)
    made = rollout(pipe, "wan", SETTINGS["ode"])
    assert type(made.scheduler) is Scheduler
    assert made.scheduler.config.shift == pipe.scheduler.config.flow_shift == 3.0
    # The Euler variant has the same weights, and the same shift in its own scheduler.
    assert torch.equal(made.output, plain(load_pipeline("wan"), "wan"))

    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=7.0)
    assert rollout_scheduler(pipe).config.shift == 7.0


@pytest.mark.parametrize("name", FAMILIES)
def test_rollout_scheduler_keeps_the_config(load_pipeline: LoadPipeline, name: str) -> None:
    pipe = load_pipeline(name)
    ours = rollout_scheduler(pipe)
    assert ours is not pipe.scheduler
    assert {**ours.config, "_class_name": None} == {**pipe.scheduler.config, "_class_name": None}


def test_a_scheduler_without_flow_matching_is_refused() -> None:
    pipe = build_wan()
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(ValueError, match=r"DDIMScheduler is not a flow-matching scheduler; use a checkpoint with"):
        rollout_scheduler(pipe)


# --- records --------------------------------------------------------------------------------------------------------


def euler_step(record: StepRecord) -> Tensor:
    """x_{k+1} of a deterministic step: the step of diffusers' own scheduler, in the wire dtype."""
    assert record.velocity is not None
    parent = FlowMatchEulerDiscreteScheduler()
    parent.set_timesteps(1)
    parent.sigmas = torch.tensor([record.sigma, record.sigma_next])
    # In float32 unless everything is in the wire dtype, as the carried precision is.
    velocity = record.velocity.to(torch.promote_types(record.velocity.dtype, record.sample.dtype))
    return parent.step(velocity, parent.timesteps[0], record.sample).prev_sample.to(record.sample.dtype)


def exact_step(args: RolloutArgs, record: StepRecord, sigmas: tuple[float, ...]) -> tuple[Tensor, float, Tensor]:
    """Mean, std and log-prob of a stochastic step in float64, from the tensors of its record."""
    assert record.velocity is not None
    assert args.noise_level is not None
    assert args.resolved_log_prob_kind is not None
    mean, std = reference.mean_and_std(
        args.dynamics, record.sample, record.velocity, record.sigma, record.sigma_next, sigmas[1], args.noise_level
    )
    return mean, std, reference.log_prob(record.next_sample, mean, std, args.resolved_log_prob_kind)


def check_records(args: RolloutArgs, made: Run, wire: torch.dtype) -> None:
    """Everything that a record of a rollout over a clone promises."""
    stochastic = args.stochastic_steps(made.scheduler.rollout_sigmas)
    assert [record.step_index for record in made.records] == list(range(STEPS))
    for record in made.records:
        k = record.step_index
        assert (record.sigma, record.sigma_next) == made.scheduler.rollout_sigmas[k : k + 2]
        assert record.sample.dtype == record.next_sample.dtype == wire
        assert record.sample.shape == record.next_sample.shape
        assert record.sample.shape[0] == len(SEEDS)
        assert record.next_sample.isfinite().all()
        if k:
            assert torch.equal(record.sample, made.records[k - 1].next_sample)
        assert record.stochastic == (k in stochastic)
        assert record.velocity is not None
        assert record.velocity.shape == record.sample.shape
        assert record.mean is not None
        assert record.mean.dtype == torch.float32
        if not record.stochastic:
            assert record.noise_std == 0.0
            assert record.log_prob is None
            assert record.noise is None
            assert torch.equal(record.next_sample, euler_step(record))
            assert torch.equal(record.next_sample, record.mean.to(wire))
            continue
        mean, std, score = exact_step(args, record, made.scheduler.rollout_sigmas)
        assert record.noise_std == args.noise_std(made.scheduler.rollout_sigmas, k)
        assert record.noise_std == pytest.approx(std, rel=1e-7)
        assert relative_error(record.mean, mean) < 1e-6
        assert record.noise is not None
        assert torch.equal(record.noise, NoiseSource(SEEDS).draw(k, record.sample))
        # Rounded to the wire dtype before it is scored.
        assert torch.equal(record.next_sample, (record.mean + record.noise_std * record.noise).to(wire))
        assert record.log_prob is not None
        assert record.log_prob.dtype == torch.float32
        assert record.log_prob.shape == (len(SEEDS),)
        assert relative_error(record.log_prob, score) < LOG_PROB_TOLERANCE


@pytest.mark.parametrize("kind", LOG_PROB_KINDS)
@pytest.mark.parametrize("wire", WIRE_DTYPES, ids=str)
@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_records_are_exact(load_pipeline: LoadPipeline, dynamics: str, wire: torch.dtype, kind: str) -> None:
    """In particular the log-prob is that of the record's own tensors, whatever the wire dtype.

    The schedule and the noise level are hard ones: the last steps have a std of 3e-4 (``sde``), which magnifies errors.
    """
    sigmas = as_float32((1.0, 0.667, 0.334, 0.001, 0.0))
    args = with_debug(RolloutArgs(dynamics, 0.3), log_prob_kind=kind, latents_dtype=wire, sigmas=sigmas)
    check_records(args, rollout(load_pipeline("flux"), "flux", args), wire)


@pytest.mark.parametrize(
    ("name", "wire"), [*itertools.product(FAMILIES, [torch.float32, torch.bfloat16]), ("flux", torch.float16)], ids=str
)
def test_records_are_exact_with_a_bfloat16_model(load_pipeline: LoadPipeline, name: str, wire: torch.dtype) -> None:
    args = with_debug(SETTINGS["sde"], latents_dtype=wire, stochastic_step_indices=(0, 2))
    check_records(args, rollout(load_pipeline(name, torch.bfloat16), name, args), wire)


@pytest.mark.parametrize("wire", WIRE_DTYPES, ids=str)
def test_records_are_exact_with_the_scheduler_set(load_pipeline: LoadPipeline, wire: torch.dtype) -> None:
    """x_0 comes from the pipeline in float32: what is sent of it must be what the first step is made from."""
    args = with_debug(SETTINGS["sde"], latents_dtype=wire)
    check_records(args, rollout_set(load_pipeline("flux"), "flux", args), wire)


@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_scoring_the_unrounded_value_would_differ(load_pipeline: LoadPipeline, dynamics: str) -> None:
    args = with_debug(SETTINGS[dynamics], log_prob_kind="gaussian", latents_dtype=torch.bfloat16, noise_level=0.1)
    made = rollout(load_pipeline("flux"), "flux", args)
    differences = []
    for record in made.records:
        if record.log_prob is None:
            continue
        _, _, score = exact_step(args, record, made.scheduler.rollout_sigmas)
        assert relative_error(record.log_prob, score) < LOG_PROB_TOLERANCE
        assert record.mean is not None
        assert record.noise is not None
        unrounded = log_prob(record.mean + record.noise_std * record.noise, record.mean, record.noise_std)
        differences.append(relative_error(unrounded, record.log_prob))
    assert len(differences) >= STEPS - 1
    assert max(differences) > 50 * LOG_PROB_TOLERANCE


@pytest.mark.parametrize(
    ("name", "indices"), [*((name, (1, 2)) for name in FAMILIES), ("flux", (0,)), ("flux", (3,)), ("flux", ())]
)
def test_steps_outside_the_stochastic_ones_follow_the_ode(
    load_pipeline: LoadPipeline, name: str, indices: tuple[int, ...]
) -> None:
    args = with_debug(SETTINGS["dance"], stochastic_step_indices=indices)
    made = rollout(load_pipeline(name), name, args)
    check_records(args, made, torch.float32)
    assert tuple(made.log_probs) == indices


def test_cps_ends_with_a_deterministic_step(load_pipeline: LoadPipeline) -> None:
    args = with_debug(SETTINGS["cps"])
    made = rollout(load_pipeline("sd3"), "sd3", args)
    assert tuple(made.log_probs) == (0, 1, 2)
    assert made.records[-1].log_prob is None
    assert torch.equal(made.records[-1].next_sample, euler_step(made.records[-1]))


@pytest.mark.parametrize("debug", [(), ("noise",), ("mean",), ("velocity",), DEBUG_TENSORS], ids=str)
def test_debug_tensors_are_kept_on_request_only(debug: tuple[str, ...]) -> None:
    args = dataclasses.replace(SETTINGS["sde"], debug=debug, stochastic_step_indices=(0, 1), sigmas=SIGMAS)
    scheduler = Scheduler()
    scheduler.prepare_rollout(args, SEEDS)
    run_alone(scheduler, normal(2, 16, 4, 4))
    for record in scheduler.rollout_records:
        kept = {name for name in DEBUG_TENSORS if getattr(record, name) is not None}
        expected = set(debug) if record.stochastic else set(debug) - {"noise"}
        assert kept == expected
        if "velocity" in debug:
            assert torch.equal(record.velocity, 0.3 * record.sample)
        if "noise" in kept:
            assert torch.equal(record.noise, NoiseSource(SEEDS).draw(record.step_index, record.sample))
        if "mean" in kept and record.stochastic:
            mean, _ = transition(
                "sde", record.sample, 0.3 * record.sample, record.sigma, record.sigma_next, SIGMAS[1], 0.7
            )
            assert torch.equal(record.mean, mean)


def test_a_record_is_immutable() -> None:
    scheduler = Scheduler()
    scheduler.prepare_rollout(SETTINGS["sde"], SEEDS)
    run_alone(scheduler, normal(2, 16, 4, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheduler.rollout_records[0].log_prob = None  # type: ignore[misc]


@pytest.mark.parametrize("wire", WIRE_DTYPES, ids=str)
@pytest.mark.parametrize("latents", [torch.float32, torch.bfloat16], ids=str)
def test_the_carried_dtype_holds_the_wire_dtype_and_the_last_is_the_velocitys(
    wire: torch.dtype, latents: torch.dtype
) -> None:
    scheduler = Scheduler()
    scheduler.prepare_rollout(dataclasses.replace(SETTINGS["sde"], latents_dtype=wire), SEEDS)
    scheduler.set_timesteps(STEPS)
    x = normal(2, 16, 4, 4).to(latents)
    for k, t in enumerate(scheduler.timesteps):
        x = scheduler.step((0.3 * x).to(torch.bfloat16), t, x).prev_sample
        record = scheduler.rollout_records[-1]
        assert record.next_sample.dtype == wire
        assert x.dtype == (torch.bfloat16 if k == STEPS - 1 else torch.promote_types(latents, wire))
        assert torch.equal(x, record.next_sample.to(x.dtype))


# --- noise ----------------------------------------------------------------------------------------------------------


def test_initial_noise_seeds_share_x_0_only(load_pipeline: LoadPipeline) -> None:
    pipe = load_pipeline("flux")
    scheduler = rollout_scheduler(pipe)
    noise = scheduler.prepare_rollout(SETTINGS["sde"], SEEDS, initial_noise_seeds=[5, 5])
    clone_pipeline(pipe, scheduler)(**call_arguments("flux"), generator=noise.initial_generators())
    first, *_ = scheduler.rollout_records
    assert torch.equal(first.sample[0], first.sample[1])
    assert not torch.equal(first.next_sample[0], first.next_sample[1])


@pytest.mark.parametrize("indices", [None, (1, 3)])
def test_sequential_noise_is_the_loop_of_the_references(
    load_pipeline: LoadPipeline, indices: tuple[int, ...] | None
) -> None:
    """One generator per sample draws x_0, then the noise of each stochastic step in order."""
    args = with_debug(SETTINGS["sde"], noise_mode="sequential", stochastic_step_indices=indices)
    made = rollout(load_pipeline("sd3"), "sd3", args)
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]

    def draw() -> Tensor:
        return torch.stack([torch.randn(made.latents[0].shape[1:], generator=generator) for generator in generators])

    assert torch.equal(made.latents[0], draw())
    for record in made.records:
        assert record.stochastic == (indices is None or record.step_index in indices)
        if record.noise is not None:
            assert torch.equal(record.noise, draw())


# --- resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "keyed") for name in FAMILIES), ("flux", "sequential"), ("wan", "sequential")]
)
def test_resuming_at_any_step_reproduces_the_rest_bit_for_bit(
    load_pipeline: LoadPipeline, name: str, mode: str
) -> None:
    pipe = load_pipeline(name)
    args = with_debug(SETTINGS["sde"], noise_mode=mode, stochastic_step_indices=(0, 1, 3))
    whole = rollout(pipe, name, args)
    for k in range(STEPS):
        resumed = rollout(pipe, name, args, start=(k, whole.latents[k]))
        assert resumed.scheduler.rollout_steps == tuple(range(k, STEPS))
        assert resumed.scheduler.rollout_sigmas == whole.scheduler.rollout_sigmas
        assert_same_records(resumed.records, whole.records[k:])
        assert torch.equal(resumed.output, whole.output)


@pytest.mark.parametrize("mode", ["keyed", "sequential"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_in_any_precision(load_pipeline: LoadPipeline, wire: torch.dtype, mode: str) -> None:
    pipe = load_pipeline("wan", torch.bfloat16)
    args = with_debug(SETTINGS["cps"], noise_mode=mode, latents_dtype=wire, sigmas=SIGMAS)
    whole = rollout(pipe, "wan", args)
    resumed = rollout(pipe, "wan", args, start=(2, whole.latents[2]))
    assert_same_records(resumed.records, whole.records[2:])
    assert torch.equal(resumed.output, whole.output)


def test_branching_from_one_latent_with_other_seeds(load_pipeline: LoadPipeline) -> None:
    pipe = load_pipeline("flux")
    whole = rollout(pipe, "flux", SETTINGS["sde"])
    branched = rollout(pipe, "flux", SETTINGS["sde"], start=(2, whole.latents[2]), seeds=(SEEDS[0], 77))
    assert torch.equal(branched.records[0].sample, whole.records[2].sample)
    assert torch.equal(branched.records[0].next_sample[0], whole.records[2].next_sample[0])
    assert not torch.equal(branched.records[0].next_sample[1], whole.records[2].next_sample[1])


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainable(load_pipeline: LoadPipeline) -> Any:
    """``trainable(name, dtype)``: a pipeline whose denoiser alone takes gradients, until the test ends."""
    used: list[nn.Module] = []

    def get(name: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        pipe = load_pipeline(name, dtype)
        used.append(pipe.transformer.requires_grad_())
        return pipe

    yield get
    for module in used:
        module.requires_grad_(False)
        module.zero_grad()


def weights_with_gradients(module: nn.Module) -> set[str]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(gradient is None or gradient.isfinite().all() for gradient in found.values())
    return {name for name, gradient in found.items() if gradient is not None and gradient.any()}


@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
@pytest.mark.parametrize("wire", WIRE_DTYPES, ids=str)
def test_replay_is_exactly_the_rollout(load_pipeline: LoadPipeline, wire: torch.dtype, dynamics: str) -> None:
    pipe = load_pipeline("flux")
    args = with_debug(SETTINGS[dynamics], latents_dtype=wire)
    made = rollout(pipe, "flux", args)
    with torch.no_grad():
        replayed = replay(pipe, "flux", pinned(args, made), made.latents, range(STEPS))
    # A replay draws no noise; all else is the same.
    assert_same_records(replayed.records, [dataclasses.replace(record, noise=None) for record in made.records])
    assert torch.equal(replayed.output, made.output)
    assert torch.equal(replayed.scheduler.collect_rollout_log_probs(), made.scheduler.collect_rollout_log_probs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_a_replay_reach_the_weights_of_the_denoiser(
    trainable: Callable[..., DiffusionPipeline], name: str, dtype: torch.dtype
) -> None:
    pipe = trainable(name, dtype)
    args = with_debug(SETTINGS["sde"], latents_dtype=dtype)
    calls: list[dict[str, Any]] = []

    def capturing(component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
        calls.append(arguments)
        return module(**arguments)

    made = rollout(pipe, name, args, run=capturing)
    (velocity,) = pipe.transformer(**calls[0])
    velocity.square().sum().backward()
    expected_names = weights_with_gradients(pipe.transformer)
    pipe.transformer.zero_grad()
    # All but the text's side of the last block, whose output no family reads.
    assert len(expected_names) > 0.8 * len(list(pipe.transformer.parameters()))

    replayed = replay(pipe, name, pinned(args, made), made.latents, (0, 2))
    for record in replayed.records:
        expected = made.records[record.step_index]
        assert record.log_prob is not None
        assert record.log_prob.requires_grad
        assert torch.equal(record.log_prob, expected.log_prob)  # the ratio is exactly 1
        assert torch.equal(record.mean, expected.mean)
        record.log_prob.sum().backward()
    assert weights_with_gradients(pipe.transformer) == expected_names


@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_gradients_of_a_replay_are_the_slope_of_the_log_prob(
    trainable: Callable[..., DiffusionPipeline], dynamics: str
) -> None:
    """Moving the weights a little along the gradient moves the log-prob by what the gradient says."""
    pipe = trainable("flux")
    made = rollout(pipe, "flux", SETTINGS[dynamics])
    args, steps = pinned(SETTINGS[dynamics], made), (1,)
    replay(pipe, "flux", args, made.latents, steps).records[0].log_prob.sum().backward()
    parameters = list(pipe.transformer.parameters())
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()

    @torch.no_grad()
    def moved(distance: float) -> float:
        for parameter in parameters:
            parameter += distance * parameter.grad / norm
        score = replay(pipe, "flux", args, made.latents, steps).records[0].log_prob.double().sum()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        return score.item()

    before = [parameter.detach().clone() for parameter in parameters]
    slope = (moved(0.02) - moved(-0.02)) / 0.04
    assert slope == pytest.approx(norm.item(), rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_replaying_some_steps_runs_the_denoiser_for_these_only(load_pipeline: LoadPipeline, name: str) -> None:
    pipe = load_pipeline(name)
    calls = 0

    def counting(component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        return module(**arguments)

    made = rollout(pipe, name, SETTINGS["sde"], run=counting)
    calls_per_step = calls // STEPS
    for steps in ((3,), (0, 2), (0, 1, 3)):
        needed = {k: made.latents[k] for step in steps for k in (step, step + 1)}
        calls = 0
        with torch.no_grad():
            replayed = replay(pipe, name, pinned(SETTINGS["sde"], made), needed, steps, run=counting)
        assert calls == calls_per_step * len(steps)
        assert tuple(replayed.log_probs) == steps
        for step in steps:
            assert torch.equal(replayed.log_probs[step], made.log_probs[step])


def test_replay_scores_deterministic_steps_as_none(load_pipeline: LoadPipeline) -> None:
    pipe = load_pipeline("flux")
    args = with_debug(SETTINGS["cps"], stochastic_step_indices=(1, 3))
    made = rollout(pipe, "flux", args)
    with torch.no_grad():
        replayed = replay(pipe, "flux", pinned(args, made), made.latents, range(STEPS))
    assert tuple(replayed.log_probs) == (1,)
    assert torch.equal(replayed.log_probs[1], made.log_probs[1])


def test_replay_in_a_plain_script(load_pipeline: LoadPipeline) -> None:
    pipe = load_pipeline("sd3")
    made = rollout_set(pipe, "sd3", SETTINGS["sde"])
    scheduler = from_config(pipe.scheduler)
    scheduler.prepare_replay(pinned(SETTINGS["sde"], made), made.latents, steps=(1, 2, 3))
    with scheduler_set(pipe, scheduler):
        pipe(**call_arguments("sd3"), latents=made.latents[1])
    assert torch.equal(scheduler.collect_rollout_log_probs(), made.scheduler.collect_rollout_log_probs()[:, 1:])


def test_a_changed_policy_changes_the_replayed_log_probs(trainable: Callable[..., DiffusionPipeline]) -> None:
    pipe = trainable("flux")
    made = rollout(pipe, "flux", SETTINGS["sde"])
    bias = pipe.transformer.proj_out.bias
    with torch.no_grad():
        bias += 0.1
        replayed = replay(pipe, "flux", pinned(SETTINGS["sde"], made), made.latents, range(STEPS))
        bias -= 0.1
    for step, score in replayed.log_probs.items():
        assert (score - made.log_probs[step]).abs().min() > 1e-4


# --- several at once ------------------------------------------------------------------------------------------------


def test_rollouts_at_the_same_time_do_not_share_state(load_pipeline: LoadPipeline) -> None:
    """Three rollouts over one pipeline, switching at every denoiser call, give what each gives alone."""
    pipe = load_pipeline("flux")
    settings = [
        with_debug(SETTINGS["sde"]),
        with_debug(SETTINGS["cps"], sigmas=as_float32((1.0, 0.6, 0.1)), noise_mode="sequential"),
        with_debug(SETTINGS["ode"], latents_dtype=torch.bfloat16),
    ]
    alone = [rollout(pipe, "flux", args) for args in settings]

    def parking(component: str, module: nn.Module, arguments: dict[str, Any]) -> Any:
        getcurrent().parent.switch()
        return module(**arguments)

    results: dict[int, Run] = {}

    def one(index: int) -> None:
        results[index] = rollout(pipe, "flux", settings[index], run=parking)

    running = [greenlet(one) for _ in settings]
    switches = 0
    # The pipelines' own no_grad blocks are left in another order than they were entered: keep that to this block.
    with torch.no_grad():
        while any(not task.dead for task in running):
            for index, task in enumerate(running):
                if not task.dead:
                    task.switch(index)
                    switches += 1
    assert switches == sum(len(made.records) + 1 for made in alone)
    for index, expected in enumerate(alone):
        assert_same_records(results[index].records, expected.records)
        assert torch.equal(results[index].output, expected.output)
        assert results[index].scheduler.rollout_sigmas == expected.scheduler.rollout_sigmas


def test_cloning_leaves_the_pipeline_as_it_was(load_pipeline: LoadPipeline) -> None:
    pipe = load_pipeline("sd3")
    before = {name: id(component) for name, component in pipe.components.items()}
    expected = plain(pipe, "sd3")
    rollout(pipe, "sd3", dataclasses.replace(SETTINGS["sde"], sigmas=SIGMAS))
    assert {name: id(component) for name, component in pipe.components.items()} == before
    assert torch.equal(plain(pipe, "sd3"), expected)


# --- errors ---------------------------------------------------------------------------------------------------------


def prepare_rollout(scheduler: Scheduler, **changes: Any) -> None:
    scheduler.prepare_rollout(**{"args": SETTINGS["sde"], "seeds": SEEDS, **changes})


def prepare_replay(scheduler: Scheduler, **changes: Any) -> None:
    latents = {k: torch.zeros(2, 16, 4, 4) for k in range(STEPS + 1)}
    args = dataclasses.replace(SETTINGS["sde"], sigmas=SIGMAS)
    scheduler.prepare_replay(**{"args": args, "latents": latents, "steps": (0, 1), **changes})


@pytest.mark.parametrize("prepare", [prepare_rollout, prepare_replay])
@pytest.mark.parametrize("field", ["stochastic_sampling", "invert_sigmas"])
def test_unsupported_configs(prepare: Callable[..., None], field: str) -> None:
    with pytest.raises(RolloutArgsError, match=f"^{field}: .*; set it to False"):
        prepare(Scheduler(**{field: True}))


@pytest.mark.parametrize("prepare", [prepare_rollout, prepare_replay])
def test_settings_are_validated(prepare: Callable[..., None]) -> None:
    scheduler = Scheduler()
    with pytest.raises(RolloutArgsError, match=r"^noise_level: "):
        prepare(scheduler, args=RolloutArgs("sde"))
    run_alone(scheduler, normal(2, 16, 4, 4))
    assert scheduler.rollout_records == []  # still off


@pytest.mark.parametrize("start_step", [STEPS, STEPS + 3, -1])
@pytest.mark.parametrize("sigmas", [None, SIGMAS])
def test_start_step_out_of_range(start_step: int, sigmas: tuple[float, ...] | None) -> None:
    scheduler = Scheduler()
    with pytest.raises(RolloutArgsError, match=f"^start_step: {start_step} .*pass"):  # noqa: PT012
        prepare_rollout(scheduler, args=dataclasses.replace(SETTINGS["sde"], sigmas=sigmas), start_step=start_step)
        scheduler.set_timesteps(STEPS)


def test_stochastic_steps_out_of_range_of_the_pipelines_own_schedule() -> None:
    scheduler = Scheduler()
    prepare_rollout(scheduler, args=dataclasses.replace(SETTINGS["sde"], stochastic_step_indices=(0, STEPS)))
    with pytest.raises(RolloutArgsError, match=f"^stochastic_step_indices: {STEPS} is out of range; pass indices from"):
        scheduler.set_timesteps(STEPS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": SETTINGS["sde"]}, "sigmas: needed by a replay; pass the schedule that the rollout reported"),
        ({"steps": ()}, "steps: none given; pass the steps to score"),
        ({"latents": {0: torch.zeros(2, 16, 4, 4)}}, r"latents: x_k missing for k in \[1, 2\]; ask the rollout"),
        ({"latents": {}, "steps": (2,)}, r"latents: x_k missing for k in \[2, 3\]; ask the rollout"),
    ],
    ids=["sigmas", "steps", "some latents", "all latents"],
)
def test_replay_needs_a_schedule_steps_and_latents(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutArgsError, match=message):
        prepare_replay(Scheduler(), **changes)


@pytest.mark.parametrize("wrong", [1, 2])
def test_replayed_latents_of_another_batch(wrong: int) -> None:
    """One stored sample must not be scored, nor continued from, as if it were each of two."""
    scheduler, x = Scheduler(), normal(2, 16, 4, 4)
    latents = {k: normal(1 if k == wrong else 2, 16, 4, 4, seed=k) for k in range(4)}
    prepare_replay(scheduler, latents=latents, steps=(0, 2))
    scheduler.set_timesteps(STEPS)
    with pytest.raises(
        RolloutArgsError, match=rf"^latents: x_{wrong} has shape \[1, 16, 4, 4\]; .* needs \[2, 16, 4, 4\]"
    ):
        scheduler.step(0.3 * x, scheduler.timesteps[0], x)


@pytest.mark.parametrize("steps", [(1, 0), (1, 1), (3, 1), (-1,), (-1, 0), (STEPS,), (0, STEPS)], ids=str)
def test_replayed_steps_are_increasing_and_in_range(steps: tuple[int, ...]) -> None:
    scheduler = Scheduler()
    latents = {k: torch.zeros(2, 16, 4, 4) for k in range(-1, STEPS + 2)}
    with pytest.raises(RolloutArgsError, match=r"^steps: .*pass"):  # noqa: PT012
        prepare_replay(scheduler, latents=latents, steps=steps)
        scheduler.set_timesteps(STEPS)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"s_churn": 0.5}, "s_churn"),
        ({"s_noise": 1.1}, "s_noise"),
        ({"per_token_timesteps": torch.ones(2, 3)}, "per_token_timesteps"),
    ],
    ids=str,
)
@pytest.mark.parametrize("prepare", [prepare_rollout, prepare_replay])
def test_step_refuses_options_that_it_cannot_honour(
    prepare: Callable[..., None], options: dict[str, Any], name: str
) -> None:
    scheduler, x = Scheduler(), torch.zeros(2, 16, 4, 4)  # what the stored latents of the replay are
    prepare(scheduler)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(RolloutArgsError, match=f"^step: a rollout cannot honour {name}"):
        scheduler.step(x, scheduler.timesteps[0], x, **options)
    with pytest.raises(RolloutArgsError, match="positional options"):
        scheduler.step(x, scheduler.timesteps[0], x, 0.5)
    assert scheduler.rollout_records == []
    # Nothing was consumed: the step can still be made, with the generator that pipelines pass along.
    scheduler.step(x, scheduler.timesteps[0], x, generator=torch.Generator(), per_token_timesteps=None)
    assert [record.step_index for record in scheduler.rollout_records] == [0]


def test_a_replay_that_does_not_start_from_its_latents_is_refused() -> None:
    """A pipeline that draws an x_0 of its own would be scored from other latents than the denoiser saw."""
    scheduler, x = Scheduler(), normal(2, 16, 4, 4)
    prepare_replay(scheduler)
    scheduler.set_timesteps(STEPS)
    with pytest.raises(RolloutArgsError, match=r"^latents: the pipeline does not start from x_0; use clone_pipeline"):
        scheduler.step(x, scheduler.timesteps[0], x)


def test_no_step_after_the_last_one() -> None:
    scheduler, x = Scheduler(), torch.zeros(2, 16, 4, 4)
    prepare_replay(scheduler, steps=(0,))
    scheduler.set_timesteps(STEPS)
    scheduler.step(x, scheduler.timesteps[0], x)
    with pytest.raises(RuntimeError, match="call prepare_rollout again"):
        scheduler.step(x, scheduler.timesteps[0], x)


def test_records_do_not_share_memory_with_what_the_pipeline_holds() -> None:
    """A pipeline that writes into its latents must not change what was recorded."""
    scheduler, x = Scheduler(), normal(2, 16, 4, 4)
    prepare_rollout(scheduler)
    scheduler.set_timesteps(STEPS)
    expected = x.clone()
    (carried,) = scheduler.step(0.3 * x, scheduler.timesteps[0], x, return_dict=False)
    record = scheduler.rollout_records[0]
    kept = record.next_sample.clone()
    x.zero_()
    carried.zero_()
    assert torch.equal(record.sample, expected)
    assert torch.equal(record.next_sample, kept)


def test_no_schedule_before_set_timesteps() -> None:
    scheduler, x = Scheduler(), normal(2, 16, 4, 4)
    prepare_rollout(scheduler)
    for read in (lambda: scheduler.rollout_sigmas, lambda: scheduler.rollout_steps):
        with pytest.raises(RuntimeError, match="no schedule yet"):
            read()
    with pytest.raises(RuntimeError, match="not in a rollout"):
        scheduler.step(x, 1000.0, x)
    with pytest.raises(RuntimeError, match="no recorded steps"):
        scheduler.collect_rollout_log_probs()


def test_start_latents_of_another_shape(load_pipeline: LoadPipeline) -> None:
    wrong = torch.zeros(2, 16, 8, 8)
    with pytest.raises(StartLatentsError, match=r"has shape \[16, 8, 8\]; pass \[16, 8, 6\]"):
        rollout(load_pipeline("sd3"), "sd3", SETTINGS["sde"], start=(1, wrong))


def test_every_dynamics_is_tested() -> None:
    assert set(SETTINGS) == set(DYNAMICS)
    assert x_0_generators()[0].initial_seed() == NoiseSource(SEEDS).initial_generators()[0].initial_seed()
