from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rollout_service.scheduler import DYNAMICS, LOG_PROB_KINDS, as_float32, log_prob, transition
from rollout_service.scheduler.dynamics import SIGMA_ONE_TOLERANCE, drift_and_std, log_prob_of_error
from tests.support import reference

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-6
"""Relative to max(1, |value|)."""
GOLDEN_OFF = {"mean": {"c051", "c081"}, "next_sample": {"c051", "c081"}, "log_prob": set(), "noise_std": set()}
"""Where the golden values are themselves off from float64 by more than the tolerance: ``dance`` from a small sigma to
0, computed in fp32 with the cancelling difference x - (1 - s) x0, divided by 2 s^2."""
STOCHASTIC = [name for name in DYNAMICS if name != "ode"]
SHAPES = {2: (3, 7), 3: (2, 6, 5), 4: (2, 3, 4, 5), 5: (2, 3, 2, 4, 5)}
U = 2.0**-24
"""Half a unit in the last place of fp32 at 1: the relative error of one rounding."""


def relative_error(actual: Tensor | float, expected: Tensor | float) -> float:
    """Largest error relative to max(1, |expected|)."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape
    return reference.relative_error(actual, expected)


@dataclass(frozen=True)
class Case:
    """A golden transition; the scalars are those of its schedule."""

    name: str
    dynamics: str
    noise_level: float
    sigma: float
    sigma_next: float
    sigma_max: float
    noise_std: float
    tensors: dict[str, Tensor]

    @property
    def scalars(self) -> tuple[float, float, float, float]:
        return self.sigma, self.sigma_next, self.sigma_max, self.noise_level

    @property
    def kind(self) -> str:
        return "squared_error" if self.dynamics == "cps" else "gaussian"

    def golden(self) -> dict[str, Tensor | float]:
        stored = {name: self.tensors[name] for name in ("mean", "next_sample", "log_prob")}
        return {**stored, "noise_std": self.noise_std}

    def ours(self) -> dict[str, Tensor | float]:
        mean, std = transition(self.dynamics, self.tensors["sample"], self.tensors["velocity"], *self.scalars)
        next_sample = mean + std * self.tensors["noise"]
        score = log_prob(next_sample, mean, std, self.kind)
        return {"mean": mean, "next_sample": next_sample, "log_prob": score, "noise_std": std.item()}

    def float64(self) -> dict[str, Tensor | float]:
        mean, std = reference.mean_and_std(
            self.dynamics, self.tensors["sample"], self.tensors["velocity"], *self.scalars
        )
        next_sample = mean + std * self.tensors["noise"].double()
        score = reference.log_prob(next_sample, mean, std, self.kind)
        return {"mean": mean, "next_sample": next_sample, "log_prob": score, "noise_std": std}


@functools.cache
def golden_cases() -> dict[str, Case]:
    tensors = load_file(GOLDEN / "step_reference.safetensors")
    cases = {}
    for entry in json.loads((GOLDEN / "step_reference.json").read_text()):
        name = entry["case"]
        own = {key.split(".")[1]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        scalars = {key: entry[key] for key in ("noise_level", "sigma", "sigma_next", "sigma_max", "noise_std")}
        cases[name] = Case(name, entry["dynamics"].removesuffix("_sde"), **scalars, tensors=own)
    return cases


@pytest.fixture(params=golden_cases())
def case(request: pytest.FixtureRequest) -> Case:
    return golden_cases()[request.param]


def test_golden_file_is_complete() -> None:
    cases = golden_cases().values()
    assert len(cases) == 54
    assert {case.dynamics for case in cases} == set(STOCHASTIC)
    assert {case.tensors["sample"].ndim for case in cases} == {3, 4, 5}
    assert sum(case.noise_std == 0 for case in cases) == 4


def test_golden_transition(case: Case) -> None:
    """Within 1e-6 of float64 always; within 1e-6 of the golden values wherever those are themselves."""
    ours, golden, exact = case.ours(), case.golden(), case.float64()
    for quantity, value in ours.items():
        assert relative_error(value, exact[quantity]) <= TOLERANCE, quantity
        if relative_error(golden[quantity], exact[quantity]) <= TOLERANCE:
            assert relative_error(value, golden[quantity]) <= TOLERANCE, quantity
        else:
            assert case.name in GOLDEN_OFF[quantity], quantity


def test_golden_values_that_are_off_are_the_known_ones() -> None:
    off: dict[str, set[str]] = {quantity: set() for quantity in GOLDEN_OFF}
    for name, case in golden_cases().items():
        golden, exact = case.golden(), case.float64()
        for quantity in off:
            if relative_error(golden[quantity], exact[quantity]) > TOLERANCE:
                off[quantity].add(name)
    assert off == GOLDEN_OFF


@pytest.mark.parametrize("name", [name for name, case in golden_cases().items() if case.noise_std == 0])
def test_golden_deterministic_step_has_no_gaussian_log_prob(name: str) -> None:
    case = golden_cases()[name]
    assert case.dynamics == "cps"
    assert case.sigma_next == 0
    mean, std = transition(case.dynamics, case.tensors["sample"], case.tensors["velocity"], *case.scalars)
    assert std == 0
    with pytest.raises(ValueError, match="noise_std"):
        log_prob(mean, mean, std, "gaussian")


def normal(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(rank: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return normal(SHAPES[rank], 1).to(dtype), normal(SHAPES[rank], 2).to(dtype)


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, float, float, float, float]:
    """(dynamics, sigma, sigma_next, sigma_max, noise level), the sigmas exact in fp32."""
    dynamics = draw(st.sampled_from(DYNAMICS))
    # From 1 (often) down to 1e-3, then to anything down to 0.
    sigma = draw(st.one_of(st.just(1.0), st.floats(1e-3, 1.0), st.floats(0.9, 1.0)))
    sigma_next = draw(st.one_of(st.just(0.0), st.floats(0.0, 0.999))) * sigma
    sigma_max = draw(st.floats(0.5, 0.998))
    noise_level = draw(st.floats(0.01, 1.0 if dynamics == "cps" else 2.0))
    return dynamics, *as_float32((sigma, sigma_next, sigma_max)), noise_level


@given(step=steps(), rank=st.integers(2, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_transition_and_log_prob_agree_with_float64(
    step: tuple[str, float, float, float, float], rank: int, dtype: torch.dtype
) -> None:
    """The tolerance is the error that fp32 arithmetic must make, so it leaves no room for another one.

    drift = p x + q v has two rounded coefficients, two rounded products and one rounded sum: at most
    3 u (|p x| + |q v|), taken as 4; mean = x + drift is one more rounding, taken as two. The coefficients may be large
    (``dance`` from a small sigma), so an absolute tolerance would not do. In the log-prob that error enters through the
    square, and the mean of squares, all positive, adds a relative error of some u of its own; 16 u covers it.
    """
    dynamics, *scalars = step
    x, v = inputs(rank, dtype)
    mean, std = transition(dynamics, x, v, *scalars)
    exact_mean, exact_std = reference.mean_and_std(dynamics, x, v, *scalars)
    assert mean.dtype == std.dtype == torch.float32
    assert mean.shape == x.shape
    assert std.shape == ()

    # The mean is linear: its values at (1, 0) and (0, 1) are its coefficients 1 + p and q.
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    p = (reference.mean_and_std(dynamics, one, zero, *scalars)[0] - 1).abs()
    q = reference.mean_and_std(dynamics, zero, one, *scalars)[0].abs()
    drift_bound = 4 * U * (p * x.double().abs() + q * v.double().abs())
    drift, drift_std = drift_and_std(dynamics, x, v, *scalars)
    assert ((drift.double() - (exact_mean - x.double())).abs() <= drift_bound + 1e-15 * exact_mean.abs()).all()
    assert torch.equal(mean, x.float() + drift)
    assert isinstance(drift_std, float)  # no scalar goes to the device
    assert std == drift_std
    mean_bound = drift_bound + 2 * U * exact_mean.abs()
    assert ((mean.double() - exact_mean).abs() <= mean_bound).all()
    assert abs(std.item() - exact_std) <= 2 * U * exact_std

    if exact_std < 1e-30:
        with pytest.raises(ValueError, match="noise_std"):
            log_prob(mean, mean, 0.0)
        return
    next_sample = (exact_mean + exact_std * normal(SHAPES[rank], 3)).to(dtype)
    error = (next_sample.double() - exact_mean).abs()
    for kind, scale in (("squared_error", 1.0), ("gaussian", 1 / (2 * exact_std**2))):
        exact = reference.log_prob(next_sample, exact_mean, exact_std, kind)
        bound = scale * (2 * error * mean_bound + mean_bound.square()).flatten(1).mean(1)
        bound += 16 * U * (scale * error.square().flatten(1).mean(1) + abs(math.log(exact_std)) + 1)
        ours = log_prob(next_sample, mean, std, kind)
        assert ours.dtype == torch.float32
        assert ours.shape == x.shape[:1]
        assert ((ours.double() - exact).abs() <= bound).all(), kind
        assert torch.equal(ours, log_prob_of_error(next_sample.float() - mean, std, kind))


FP32_SIGMAS = as_float32((1.0, 0.9601293, 0.7072785, 0.33400002, 0.0089285718, 0.0))
PAIRS = list(itertools.pairwise(FP32_SIGMAS))


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize(("sigma", "sigma_next"), PAIRS)
def test_ode_is_the_euler_step_of_diffusers_bit_for_bit(rank: int, sigma: float, sigma_next: float) -> None:
    x, v = inputs(rank)
    s, s_next = torch.tensor(sigma, dtype=torch.float32), torch.tensor(sigma_next, dtype=torch.float32)
    expected = x + (s_next - s) * v
    mean, std = transition("ode", x, v, sigma, sigma_next, FP32_SIGMAS[1], 0.0)
    assert torch.equal(mean, expected)
    assert std == 0
    rows = x.shape[0]
    mean, std = transition("ode", x, v, s.expand(rows), s_next.expand(rows), FP32_SIGMAS[1], 0.0)
    assert torch.equal(mean, expected)
    assert torch.equal(std, torch.zeros(rows))


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize(("sigma", "sigma_next"), PAIRS)
def test_noise_level_zero_is_ode_exactly(dynamics: str, sigma: float, sigma_next: float) -> None:
    x, v = inputs()
    s, s_next = torch.full(x.shape[:1], sigma), torch.full(x.shape[:1], sigma_next)
    for sigmas in ((sigma, sigma_next), (s, s_next)):
        expected, _ = transition("ode", x, v, *sigmas, FP32_SIGMAS[1], 0.7)
        mean, std = transition(dynamics, x, v, *sigmas, FP32_SIGMAS[1], 0.0)
        assert torch.equal(mean, expected)
        assert not std.any()


@given(step=steps(), rank=st.integers(2, 5), other_next=st.floats(0.0, 0.5))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_sigmas_per_sample_equal_the_float_path_row_by_row(
    step: tuple[str, float, float, float, float], rank: int, other_next: float
) -> None:
    """Bit for bit: both paths compute the coefficients in float64 and round them to fp32 once."""
    dynamics, sigma, sigma_next, sigma_max, noise_level = step
    x, v = inputs(rank)
    rows = x.shape[0]
    (half,) = as_float32((other_next,))
    sigmas, sigmas_next = [sigma, 0.75, 1.0][:rows], [sigma_next, half, half][:rows]
    mean, std = transition(
        dynamics, x, v, torch.tensor(sigmas), torch.tensor(sigmas_next), torch.full((rows,), sigma_max), noise_level
    )
    assert mean.shape == x.shape
    assert std.shape == (rows,)
    for row, (s, s_next) in enumerate(zip(sigmas, sigmas_next, strict=True)):
        alone, alone_std = transition(dynamics, x[row : row + 1], v[row : row + 1], s, s_next, sigma_max, noise_level)
        assert torch.equal(mean[row : row + 1], alone)
        assert std[row] == alone_std


def test_log_prob_takes_a_std_per_sample() -> None:
    x, mean = inputs()
    stds = torch.tensor([0.2, 0.7])
    scores = log_prob(x, mean, stds)
    for row, std in enumerate(stds):
        assert torch.equal(scores[row : row + 1], log_prob(x[row : row + 1], mean[row : row + 1], std))
        assert torch.equal(scores[row : row + 1], log_prob(x[row : row + 1], mean[row : row + 1], std.item()))


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [3, 5])
def test_half_precision_inputs_are_computed_in_fp32(dynamics: str, dtype: torch.dtype, rank: int) -> None:
    x, v = inputs(rank, dtype)
    scalars = (*as_float32((0.8, 0.6, 0.9)), 0.7)
    mean, std = transition(dynamics, x, v, *scalars)
    expected, expected_std = transition(dynamics, x.float(), v.float(), *scalars)
    assert torch.equal(mean, expected)
    assert std == expected_std
    mixed, _ = transition(dynamics, x, v.float(), *scalars)
    assert torch.equal(mixed, expected)
    assert torch.equal(log_prob(x, v, 0.5), log_prob(x.float(), v.float(), 0.5))


def test_sde_tolerance_around_one_is_the_documented_one() -> None:
    assert SIGMA_ONE_TOLERANCE == 1e-4


@pytest.mark.parametrize("sigma", [1.0, 1 - 1e-6, 1 - 1e-4])
@pytest.mark.parametrize("per_sample", [False, True])
def test_sde_near_one_uses_sigma_max(sigma: float, per_sample: bool) -> None:
    """Here the diffusion coefficient diverges; schedules start at 1 or (UniPC) at 1 - 1e-6."""
    x, v = inputs()
    sigma_next, sigma_max, n = 0.9, 0.95, 0.7
    given_sigma = torch.full(x.shape[:1], sigma, dtype=torch.float64) if per_sample else sigma
    mean, std = transition("sde", x, v, given_sigma, sigma_next, sigma_max, n)
    expected_std = n * math.sqrt(sigma / (1 - sigma_max)) * math.sqrt(sigma - sigma_next)
    expected_mean, _ = reference.mean_and_std("sde", x, v, sigma, sigma_next, sigma_max, n)
    assert std.isfinite().all()
    torch.testing.assert_close(std.double(), torch.full_like(std, expected_std, dtype=torch.float64), rtol=2e-7, atol=0)
    assert relative_error(mean, expected_mean) <= TOLERANCE
    assert log_prob(mean + 0.1, mean, std).isfinite().all()


@pytest.mark.parametrize("sigma", [1 - 1.1e-4, *as_float32((1 - 1e-4,))])
def test_sde_beyond_the_tolerance_uses_its_own_sigma(sigma: float) -> None:
    """The fp32 value nearest to 1 - 1e-4 is a little further from 1 than 1e-4."""
    x, v = inputs()
    for given_sigma in (sigma, torch.full(x.shape[:1], sigma, dtype=torch.float64)):
        _, std = transition("sde", x, v, given_sigma, 0.9, 0.95, 0.7)
        expected = 0.7 * math.sqrt(sigma / (1 - sigma)) * math.sqrt(sigma - 0.9)
        assert (std / expected - 1).abs().max() < 2e-7


@pytest.mark.parametrize("noise_level", [1.0, math.nextafter(1.0, 0.0), 1 - 1e-9, 1 - 1e-4])
@pytest.mark.parametrize(("sigma", "sigma_next"), PAIRS[:-1])
def test_cps_at_full_noise_has_no_nan(noise_level: float, sigma: float, sigma_next: float) -> None:
    x, v = inputs()
    exact_mean, exact_std = reference.mean_and_std("cps", x, v, sigma, sigma_next, FP32_SIGMAS[1], noise_level)
    for s, s_next in ((sigma, sigma_next), (torch.full(x.shape[:1], sigma), torch.full(x.shape[:1], sigma_next))):
        mean, std = transition("cps", x, v, s, s_next, FP32_SIGMAS[1], noise_level)
        assert mean.isfinite().all()
        assert relative_error(mean, exact_mean) <= TOLERANCE
        assert (std - exact_std).abs().max() <= 2 * U
        assert log_prob(mean + std.max(), mean, std).isfinite().all()


@pytest.mark.parametrize("noise_level", [0.1, 0.5, 1.0])
def test_cps_to_zero_is_ode_exactly(noise_level: float) -> None:
    x, v = inputs()
    for sigma in FP32_SIGMAS[:-1]:
        expected, _ = transition("ode", x, v, sigma, 0.0, FP32_SIGMAS[1], 0.0)
        mean, std = transition("cps", x, v, sigma, 0.0, FP32_SIGMAS[1], noise_level)
        assert std == 0
        assert torch.equal(mean, expected)
        per_sample, per_sample_std = transition(
            "cps", x, v, torch.full(x.shape[:1], sigma), torch.zeros(x.shape[0]), FP32_SIGMAS[1], noise_level
        )
        assert not per_sample_std.any()
        assert torch.equal(per_sample, expected)


def test_gradients_flow_through_the_log_prob() -> None:
    """The gradient of the gaussian log-prob to the velocity is (x' - mean) / std^2 / elements * d mean / d v."""
    x, v = inputs()
    v.requires_grad_()
    scalars = (0.8, 0.6, 0.9, 0.7)
    mean, std = transition("sde", x, v, *scalars)
    next_sample = (mean + std * normal(x.shape, 3)).detach()
    log_prob(next_sample, mean, std).sum().backward()
    exact_mean, exact_std = reference.mean_and_std("sde", x, v.detach(), *scalars)
    slope, _ = reference.mean_and_std("sde", torch.zeros(1, 1), torch.ones(1, 1), *scalars)
    expected = (next_sample - exact_mean) / exact_std**2 / x[0].numel() * slope
    assert v.grad is not None
    assert relative_error(v.grad, expected) <= TOLERANCE


@pytest.mark.parametrize("dynamics", ["euler", "SDE", ""])
def test_unknown_dynamics(dynamics: str) -> None:
    x, v = inputs()
    with pytest.raises(ValueError, match=r"dynamics: .* is unknown; pass one of ode, sde, dance, cps"):
        transition(dynamics, x, v, 0.8, 0.6, 0.9, 0.7)


@pytest.mark.parametrize(
    ("sample_shape", "velocity_shape"), [((2, 3), (2, 4)), ((2, 3), (1, 3)), ((2, 3, 1), (2, 3)), ((4,), (4,))]
)
def test_transition_needs_one_shape(sample_shape: tuple[int, ...], velocity_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sample and velocity need one shape"):
        transition("sde", torch.ones(sample_shape), torch.ones(velocity_shape), 0.8, 0.6, 0.9, 0.7)


@pytest.mark.parametrize(
    ("dynamics", "noise_level"), [("cps", 1.01), ("cps", -0.5), ("sde", -0.5), ("dance", -0.5), ("sde", math.nan)]
)
def test_noise_level_out_of_range(dynamics: str, noise_level: float) -> None:
    x, v = inputs()
    with pytest.raises(ValueError, match="noise_level"):
        transition(dynamics, x, v, 0.8, 0.6, 0.9, noise_level)


def test_log_prob_needs_one_shape() -> None:
    with pytest.raises(ValueError, match=r"differ in shape: \[2, 3\], \[2, 4\]"):
        log_prob(torch.ones(2, 3), torch.ones(2, 4), 0.5)


def test_unknown_log_prob_kind() -> None:
    x, mean = inputs()
    with pytest.raises(ValueError, match=f"log_prob_kind: .* is unknown; pass one of {', '.join(LOG_PROB_KINDS)}"):
        log_prob(x, mean, 0.5, "laplace")


@pytest.mark.parametrize("std", [0.0, -0.1, math.nan, torch.tensor(0.0), torch.tensor([0.5, 0.0])])
def test_a_gaussian_log_prob_needs_a_positive_std(std: float | Tensor) -> None:
    x, mean = inputs()
    with pytest.raises(ValueError, match="noise_std"):
        log_prob(x, mean, std)
