"""Advantages, seeds, windows and losses against float64 numpy and hashlib, written from the papers' formulas."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import reference
from trainer_client.algorithms import (
    derive_seed,
    fixed_window,
    flow_grpo_loss,
    gaussian_kl,
    group_advantages,
    guard_normalise,
    guard_step_weights,
    random_steps,
    random_window,
    sliding_window,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Array = np.ndarray[Any, np.dtype[np.float64]]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def numpy(x: Tensor) -> Array:
    return x.detach().double().numpy()


def close(value: Tensor, expected: Any, rtol: float | None = None) -> bool:
    """Of the expected shape, and equal up to the rounding of a few operations in the dtype of ``value``."""
    rtol = rtol or (1e-12 if value.dtype == torch.float64 else 3e-6)
    return value.shape == np.shape(expected) and np.allclose(numpy(value), expected, rtol=rtol, atol=rtol)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Array:
    """Gradient of a scalar function, by central differences."""
    gradient = np.zeros(at.numel())
    for index in range(at.numel()):
        shift = torch.zeros(at.numel(), dtype=torch.float64)
        shift[index] = step
        shift = shift.view(at.shape)
        gradient[index] = float(function(at + shift) - function(at - shift)) / (2 * step)
    return gradient.reshape(at.shape)


def autograd(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    x = at.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def chi_square_bound(degrees: int) -> float:
    """Above 99.9 % of the chi-square distribution (Wilson-Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def chi_square(counts: Sequence[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected


# Advantages


def expected_advantages(
    rewards: Array, ids: Sequence[object], std: str, epsilon: float, clip: float | None
) -> list[float]:
    result = []
    for reward, group in zip(rewards, ids, strict=True):
        members = np.array([r for r, g in zip(rewards, ids, strict=True) if g == group])
        spread = np.std(members if std == "group" else rewards)
        advantage = (reward - np.mean(members)) / (spread + epsilon)
        result.append(advantage if clip is None else min(max(advantage, -clip), clip))
    return result


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize(("epsilon", "clip"), [(0.01, 5.0), (1e-4, 5.0), (1e-8, None), (0.01, 0.5)])
def test_advantages(dtype: torch.dtype, std: Any, epsilon: float, clip: float | None) -> None:
    rewards = normal(24, scale=3.0).to(dtype)
    ids = [("a", "b", "c")[n % 3] for n in range(20)] + ["d"] * 3 + ["alone"]
    expected = expected_advantages(numpy(rewards), ids, std, epsilon, clip)
    got = group_advantages(rewards, ids, std=std, epsilon=epsilon, clip=clip)
    assert got.dtype == torch.float32
    assert close(got, expected)
    numbers = torch.tensor([ord(name[-1]) for name in ids])
    assert torch.equal(got, group_advantages(rewards, numbers, std=std, epsilon=epsilon, clip=clip))


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("epsilon", [0.01, 1e-8, 1e-30])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.1, -1e-20, 0.0])
def test_equal_rewards_have_no_advantage(std: Any, epsilon: float, value: float) -> None:
    ids = ["equal"] * 7 + ["alone", "other", "other"]
    advantages = group_advantages([value] * 8 + [1.0, 2.0], ids, std=std, epsilon=epsilon)
    assert advantages[:8].tolist() == [0.0] * 8
    assert advantages[8] == -advantages[9] != 0
    assert group_advantages([value] * 3, [0] * 3, std=std, epsilon=epsilon).tolist() == [0.0] * 3


def test_advantages_are_clamped_on_both_sides_and_carry_no_gradient() -> None:
    rewards = torch.tensor([0.0] * 99 + [1.0] + [0.0] * 99 + [-1.0], requires_grad=True)
    advantages = group_advantages(rewards, [0] * 100 + [1] * 100)
    assert (advantages[99], advantages[199]) == (5.0, -5.0)
    assert not advantages.requires_grad


def test_rewards_given_as_numbers_are_not_rounded() -> None:
    rewards = [1e9, 1e9 + 1, 1e9 + 2]
    expected = expected_advantages(np.array(rewards), [0] * 3, "group", 0.01, 5.0)
    for given in (rewards, np.array(rewards), torch.tensor(rewards, dtype=torch.float64)):
        assert close(group_advantages(given, (0, 0, 0)), expected)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("field", "error", "changes"),
    [
        ("rewards", ValueError, {"rewards": [], "group_ids": []}),
        ("rewards", ValueError, {"rewards": torch.ones(2, 1)}),
        ("rewards", ValueError, {"rewards": torch.tensor(1.0)}),
        ("rewards", ValueError, {"rewards": [1.0, math.nan]}),
        ("rewards", ValueError, {"rewards": torch.tensor([math.inf, 0.0], dtype=torch.float16)}),
        ("group_ids", ValueError, {"group_ids": [0]}),
        ("group_ids", ValueError, {"group_ids": torch.zeros(3)}),
        ("group_ids", ValueError, {"group_ids": torch.zeros(2, 1)}),
        ("group_ids", ValueError, {"group_ids": torch.tensor(0)}),
        ("group_ids", TypeError, {"group_ids": [[0], [0]]}),
        ("group_ids", TypeError, {"group_ids": [torch.tensor(0), torch.tensor(0)]}),
        ("std", ValueError, {"std": "batch"}),
        *(("epsilon", ValueError, {"epsilon": value}) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("clip", ValueError, {"clip": value}) for value in (0.0, -1.0, math.nan)),
    ],
)
def test_advantages_of_bad_arguments(field: str, error: type[Exception], changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{field}: "):
        group_advantages(**{"rewards": [1.0, 2.0], "group_ids": [0, 0]} | changes)


# Seeds


def hashed(base_seed: int, *parts: int | str) -> int:
    message = b"diffusion-rollout/v1/derived-seed"
    for part in (base_seed, *parts):
        payload = (part if isinstance(part, str) else str(part)).encode("utf-8")
        message += (b"s" if isinstance(part, str) else b"i") + len(payload).to_bytes(8, "little") + payload
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little") % 2**63


@pytest.mark.parametrize(("seed", "vector"), [((0,), 5915342294074625945), ((-1, 7, "ü"), 4355793225744343762)])
def test_seeds_of_the_documentation(seed: tuple[Any, ...], vector: int) -> None:
    assert derive_seed(*seed) == vector == hashed(*seed)
    assert str(vector) in (derive_seed.__doc__ or "")


@pytest.mark.parametrize(
    "arguments",
    [(0, ""), (0, "", ""), (0, 0), (2**200, -(2**70)), (-1,), (1, "-1"), (1, -1), (0, "u\u0308", "\U0001f600", "a\0b")],
)
def test_seeds_are_the_documented_hash(arguments: tuple[Any, ...]) -> None:
    assert derive_seed(*arguments) == hashed(*arguments)


def test_seeds_of_different_parts_are_unrelated() -> None:
    alike = [(0, 1, 2), (0, 12), (0, "12"), (0, "1", "2"), (0, 1, "2"), (0,), (0, ""), (0, "ü"), (0, "u\u0308")]
    seeds = [derive_seed(*arguments) for arguments in alike]
    assert len(set(seeds)) == len(alike)
    many = np.array([derive_seed(1, "sample", n) for n in range(2000)])
    assert many.dtype == np.int64
    assert many.min() >= 0
    ones = ((many[:, None] >> np.arange(63)) & 1).sum(0)
    assert abs(ones - 1000).max() < 4.5 * math.sqrt(500)


def test_seeds_of_integers_of_other_kinds() -> None:
    assert derive_seed(np.int64(5), np.uint8(7), torch.tensor(3)) == hashed(5, 7, 3)  # pyright: ignore


@pytest.mark.parametrize(
    ("field", "error", "arguments"),
    [
        *(("base_seed", TypeError, (value,)) for value in (True, "1", 1.0, None, b"1", torch.tensor(1.0))),
        *(("parts", TypeError, (0, value)) for value in (True, 1.0, None, b"1", (1,), torch.tensor(1.0))),
        ("parts", ValueError, (0, "\ud800")),
        ("parts", ValueError, (0, 10**5000)),
        ("base_seed", ValueError, (10**5000,)),
    ],
)
def test_seeds_of_bad_arguments(field: str, error: type[Exception], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=f"^{field}: "):
        derive_seed(*arguments)


# Windows


def test_fixed_windows() -> None:
    assert [fixed_window(start, 3, 5) for start in range(3)] == [(0, 1, 2), (1, 2, 3), (2, 3, 4)]
    assert fixed_window(0, 1, 1) == (0,)


@pytest.mark.parametrize(("candidates", "size"), [(5, 1), (10, 2), (10, 3), (4, 4)])
def test_random_windows_are_uniform(candidates: int, size: int) -> None:
    windows = [random_window(candidates, size, seed) for seed in range(2000)]
    starts = candidates - size + 1
    assert windows[:50] == [
        tuple(range(first, first + size)) for first in (hashed(seed, "random_window") % starts for seed in range(50))
    ]
    counts = Counter(window[0] for window in windows)
    assert sorted(counts) == list(range(starts))
    assert {window[-1] - window[0] for window in windows} == {size - 1}
    assert chi_square(list(counts.values())) < chi_square_bound(max(starts - 1, 1))


@pytest.mark.parametrize(("candidates", "size"), [(5, 1), (5, 2), (6, 4), (3, 3)])
def test_random_steps_are_uniform(candidates: int, size: int) -> None:
    draws = [random_steps(candidates, size, seed) for seed in range(2000)]
    for seed in range(50):
        ranked = sorted((hashed(seed, "random_steps", k), k) for k in range(candidates))
        assert draws[seed] == tuple(sorted(k for _, k in ranked[:size]))
    subsets = list(itertools.combinations(range(candidates), size))
    counts = Counter(draws)
    assert sorted(counts) == subsets
    assert chi_square(list(counts.values())) < chi_square_bound(max(len(subsets) - 1, 1))


@pytest.mark.parametrize(("num_steps", "size"), [(n, size) for n in (1, 2, 5, 10) for size in (1, 2, 4) if size <= n])
@pytest.mark.parametrize("stride", [1, 2, 3, 20])
@pytest.mark.parametrize("stay", [1, 3])
def test_sliding_windows(num_steps: int, size: int, stride: int, stay: int) -> None:
    """A left end that moves every ``stay`` iterations, stops at the last full window, and then rolls back."""
    left, seen = 0, set[int]()
    for iteration in range(3 * num_steps * stay):
        window = sliding_window(iteration, num_steps, size, stride, stay)
        assert window == tuple(range(left, left + size))
        seen.update(window)
        if (iteration + 1) % stay == 0:
            left = 0 if left == num_steps - size else min(left + stride, num_steps - size)
    assert stride > size or seen == set(range(num_steps))


def test_sliding_windows_by_hand() -> None:
    assert [sliding_window(i, 6, 4, 1, 25)[0] for i in (0, 24, 25, 49, 50, 74, 75)] == [0, 0, 1, 1, 2, 2, 0]
    assert [sliding_window(i, 5, 2, 2) for i in range(4)] == [(0, 1), (2, 3), (3, 4), (0, 1)]


@pytest.mark.parametrize(
    ("field", "function", "arguments"),
    [
        ("size", fixed_window, (0, 0, 5)),
        ("size", fixed_window, (0, 6, 5)),
        ("size", fixed_window, (0, 1, 0)),
        ("start", fixed_window, (-1, 2, 5)),
        ("start", fixed_window, (4, 2, 5)),
        *(("size", random_window, values) for values in ((5, 0, 1), (5, 6, 1), (0, 1, 1))),
        *(("size", random_steps, values) for values in ((5, 0, 1), (5, 6, 1), (0, 1, 1))),
        ("iteration", sliding_window, (-1, 5, 2)),
        ("size", sliding_window, (0, 5, 6)),
        ("size", sliding_window, (0, 5, 0)),
        ("size", sliding_window, (0, 0, 1)),
        ("stride", sliding_window, (0, 5, 2, 0)),
        ("iterations_per_move", sliding_window, (0, 5, 2, 1, 0)),
    ],
)
def test_windows_out_of_range(field: str, function: Callable[..., Any], arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        function(*arguments)


# Clipped objective


def expected_loss(log_prob: Array, old: Array, advantages: Array, low: float, high: float) -> tuple[float, Array]:
    """-mean(min(r A, clip(r) A)) and its gradient by log_prob: -r A / N unless the clip is what counts."""
    loss, gradient = 0.0, np.zeros_like(log_prob)
    for at in np.ndindex(log_prob.shape):
        ratio, advantage = math.exp(log_prob[at] - old[at]), advantages[at]
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        loss -= objective / log_prob.size
        if not ((advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)):
            gradient[at] = -ratio * advantage / log_prob.size
    return loss, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip_range", [0.1, (0.05, 0.2), (1.0, 0.3)])
@pytest.mark.parametrize(
    ("shape", "advantage_shape"),
    [((5,), (5,)), ((5,), (1,)), ((5,), ()), ((4, 3), (4,)), ((4, 3), (4, 3)), ((4, 3), (1, 3)), ((3, 3), (3,))],
)
def test_flow_grpo_loss(dtype: torch.dtype, clip_range: Any, shape: Any, advantage_shape: Any) -> None:
    log_prob = normal(*shape, seed=1, dtype=dtype, scale=0.2).requires_grad_()
    old = normal(*shape, seed=2, dtype=dtype, scale=0.2).requires_grad_()
    advantages = normal(*advantage_shape, seed=3, dtype=torch.float32).requires_grad_()
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    rows = numpy(advantages).reshape(advantage_shape + (1,) * (len(shape) - len(advantage_shape)))
    expected, gradient = expected_loss(numpy(log_prob), numpy(old), np.broadcast_to(rows, shape), low, high)

    terms = flow_grpo_loss(log_prob, old, advantages, clip_range=clip_range)
    terms.loss.backward()
    ratio = np.exp(numpy(log_prob) - numpy(old))
    assert close(terms.loss, expected)
    assert torch.equal(terms.loss, terms.policy_loss)
    assert close(terms.ratio, ratio)
    assert close(terms.clip_fraction, np.mean((ratio < 1 - low) | (ratio > 1 + high)))
    assert close(terms.approx_kl, np.mean(np.log(ratio) ** 2) / 2)
    assert terms.kl == 0
    assert {value.dtype for value in vars(terms).values()} == {result_dtype(dtype)}
    assert [name for name, value in vars(terms).items() if value.requires_grad] == ["loss"]
    assert old.grad is None
    assert advantages.grad is None
    assert log_prob.grad is not None
    assert close(log_prob.grad, gradient, rtol=1e-2 if dtype in (torch.bfloat16, torch.float16) else None)


@pytest.mark.parametrize("clip_range", [0.1, (0.05, 0.2)])
def test_gradient_of_the_loss_by_finite_differences(clip_range: Any) -> None:
    log_prob, old = normal(4, 3, seed=4, scale=0.2), normal(4, 3, seed=5, scale=0.2)
    mean, reference_mean = normal(4, 6, seed=6), normal(4, 6, seed=7)

    def loss(x: Tensor) -> Tensor:
        kl = gaussian_kl(mean + x.sum(1, keepdim=True), reference_mean, 0.7)
        return flow_grpo_loss(x, old, normal(4, seed=8), clip_range=clip_range, kl=kl, kl_weight=0.3).loss

    assert np.allclose(numpy(autograd(loss, log_prob)), finite_differences(loss, log_prob), atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_ratios_of_equal_log_probs_are_exactly_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    log_prob = normal(*shape, dtype=dtype, scale=1000.0).requires_grad_()
    advantages = torch.tensor([0.5, -2.0, 0.0, 1.0])
    terms = flow_grpo_loss(log_prob, log_prob.detach().clone(), advantages, clip_range=2e-6)
    terms.loss.backward()
    assert bool((terms.ratio == 1).all())
    assert terms.clip_fraction == terms.approx_kl == 0
    assert close(terms.loss, 0.5 / 4)
    rows = numpy(advantages).reshape(4, *(1,) * (len(shape) - 1))
    assert log_prob.grad is not None
    assert close(log_prob.grad, np.broadcast_to(-rows / log_prob.numel(), shape), rtol=1e-2)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (2.0, 1.5, -2.0 * 1.2, 0.0),  # better and already likelier: held
        (2.0, 1.1, -2.0 * 1.1, -2.0 * 1.1),
        (2.0, 0.5, -2.0 * 0.5, -2.0 * 0.5),  # better, and made less likely: pulled back, however far
        (-2.0, 0.5, 2.0 * 0.9, 0.0),  # worse and already less likely: held
        (-2.0, 0.95, 2.0 * 0.95, 2.0 * 0.95),
        (-2.0, 1.5, 2.0 * 1.5, 2.0 * 1.5),  # worse, and made likelier: pushed back
        (0.0, 1.5, 0.0, 0.0),
    ],
)
def test_clip_on_both_sides(advantage: float, ratio: float, loss: float, slope: float) -> None:
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    terms = flow_grpo_loss(log_ratio, torch.zeros(1), torch.tensor([advantage]), clip_range=(0.1, 0.2))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)
    assert terms.clip_fraction == float(not 0.9 <= ratio <= 1.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kl_dtype", DTYPES)
def test_kl_term(dtype: torch.dtype, kl_dtype: torch.dtype) -> None:
    log_prob, old = normal(4, seed=1, dtype=dtype, scale=0.1), normal(4, seed=2, dtype=dtype, scale=0.1)
    kl = normal(4, 2, seed=3, dtype=kl_dtype).abs().requires_grad_()
    terms = flow_grpo_loss(log_prob, old, normal(4), kl=kl, kl_weight=0.25)
    terms.loss.backward()
    assert close(terms.kl, numpy(kl).mean(), rtol=3e-6)
    assert close(terms.loss, float(terms.policy_loss) + 0.25 * numpy(kl).mean(), rtol=3e-6)
    assert {value.dtype for value in vars(terms).values()} == {result_dtype(dtype)}
    assert kl.grad is not None
    assert torch.equal(kl.grad, torch.full_like(kl, 0.25 / 8))


def test_kl_without_weight_is_reported_only() -> None:
    log_prob = normal(4, dtype=torch.float32).requires_grad_()
    kl = torch.tensor([math.nan, 1.0], requires_grad=True)
    terms = flow_grpo_loss(log_prob, log_prob.detach(), normal(4), kl=kl)
    terms.loss.backward()
    assert terms.kl.isnan()
    assert torch.equal(terms.loss, terms.policy_loss)
    assert terms.loss.isfinite()
    assert kl.grad is None


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("old_log_prob", {"old_log_prob": torch.zeros(4)}),
        ("old_log_prob", {"old_log_prob": torch.zeros(3, 4)}),
        ("log_prob", {"log_prob": torch.zeros(0, 3), "old_log_prob": torch.zeros(0, 3)}),
        *(("advantages", {"advantages": torch.zeros(shape)}) for shape in ((3,), (4, 2), (4, 3, 1), (2, 3))),
        *(("clip_range", {"clip_range": value}) for value in (0.0, -0.1, 1.5, math.nan, math.inf)),
        *(("clip_range", {"clip_range": value}) for value in ((0.0, 0.1), (0.1, 0.0), (1.1, 0.1), (0.1, math.inf))),
        *(("kl_weight", {"kl": torch.ones(4), "kl_weight": value}) for value in (-1.0, math.nan, math.inf)),
        ("kl_weight", {"kl_weight": 0.1}),
        ("kl", {"kl": torch.ones(0), "kl_weight": 0.1}),
    ],
)
def test_loss_of_bad_arguments(field: str, changes: dict[str, Any]) -> None:
    given = {"log_prob": torch.zeros(4, 3), "old_log_prob": torch.zeros(4, 3), "advantages": torch.zeros(4)}
    with pytest.raises(ValueError, match=f"^{field}: "):
        flow_grpo_loss(**given | changes)


# KL divergence


def density(x: Array, mean: float, std: float) -> Array:
    return np.exp(-((x - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))


def test_kl_is_that_of_the_densities_per_element() -> None:
    """The integral of p ln(p / q), one dimension at a time."""
    mean, other, stds = normal(2, 3, scale=0.5), normal(2, 3, seed=1, scale=0.5), (0.6, 1.3)
    x = np.linspace(-12, 12, 4801)
    expected = [
        np.mean(
            [
                (x[1] - x[0]) * np.sum(p * np.log(p / q))
                for p, q in ((density(x, float(m), std), density(x, float(o), std)) for m, o in pairs)
            ]
        )
        for pairs, std in zip((zip(mean[b], other[b], strict=True) for b in range(2)), stds, strict=True)
    ]
    assert close(gaussian_kl(mean, other, torch.tensor(stds, dtype=torch.float64)), expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "std"),
    [
        ((2, 4, 3, 3), 0.3),
        ((2, 4, 3, 3), torch.tensor(0.3)),
        ((2, 4, 3, 3), torch.tensor([0.3, 0.6], dtype=torch.float64)),
        ((2, 5), torch.tensor([0.3], dtype=torch.float16)),
        ((2, 3, 7, 4), torch.tensor([[0.3, 0.6, 0.9], [0.2, 0.4, 0.8]])),
        ((2, 3, 7), torch.tensor([[0.3, 0.6, 0.9]], dtype=torch.bfloat16)),
        ((2, 3, 7), torch.tensor([[0.3], [0.6]])),
    ],
)
def test_gaussian_kl(dtype: torch.dtype, shape: tuple[int, ...], std: float | Tensor) -> None:
    mean = normal(*shape, dtype=dtype).requires_grad_()
    other = normal(*shape, seed=1, dtype=dtype).requires_grad_()
    dims = max(1, std.ndim) if isinstance(std, Tensor) else 1
    stds = numpy(std) if isinstance(std, Tensor) else np.array(std)
    difference = (numpy(mean) - numpy(other)).reshape(*shape[:dims], -1)
    kl = gaussian_kl(mean, other, std)
    kl.sum().backward()
    assert kl.dtype == result_dtype(dtype)
    assert close(kl, np.mean(difference**2, axis=-1) / (2 * stds**2))
    assert other.grad is None
    assert mean.grad is not None
    rows = np.broadcast_to(stds, shape[:dims])[..., None] if stds.ndim else stds
    gradient = (difference / (rows**2 * difference.shape[-1])).reshape(shape)
    assert close(mean.grad, gradient, rtol=1e-2 if dtype in (torch.bfloat16, torch.float16) else None)
    assert bool((gaussian_kl(mean, mean.detach(), std) == 0).all())


def test_kl_of_sde_in_the_convention_of_flow_grpo_code() -> None:
    """There the square is over 2 a^2, a the std of `sde` without sqrt(sigma - sigma'); in the paper, a closed form."""
    sigma, sigma_next, level = 0.7, 0.6, 0.7
    d, a = sigma - sigma_next, level * math.sqrt(sigma / (1 - sigma))
    x, v, v_other = normal(1, 8), normal(1, 8, seed=1), normal(1, 8, seed=2)
    mean, std = reference.mean_and_std("sde", x, v, sigma, sigma_next, 0.9, level)
    other, _ = reference.mean_and_std("sde", x, v_other, sigma, sigma_next, 0.9, level)
    square = np.mean((numpy(mean) - numpy(other)) ** 2)
    velocity_square = np.mean((numpy(v) - numpy(v_other)) ** 2)
    paper = d / 2 * (a * (1 - sigma) / (2 * sigma) + 1 / a) ** 2 * velocity_square
    assert close(gaussian_kl(mean, other, std), [paper])
    assert close(gaussian_kl(mean, other, std / math.sqrt(d)), [square / (2 * a**2)])
    assert square / (2 * a**2) == pytest.approx(d * paper)


BAD_STDS = [0.0, -1.0, math.nan, torch.tensor(0.0), torch.tensor([0.5, 0.0]), torch.tensor([0.5, 0.5, 0.5])]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("reference_mean", {"reference_mean": torch.ones(2, 4)}),
        ("mean", {"mean": torch.ones(2), "reference_mean": torch.ones(2)}),
        ("mean", {"noise_std": torch.ones(2, 3)}),
        *(("noise_std", {"noise_std": value}) for value in BAD_STDS),
    ],
)
def test_kl_of_bad_arguments(field: str, changes: dict[str, Any]) -> None:
    given = {"mean": torch.zeros(2, 3), "reference_mean": torch.zeros(2, 3), "noise_std": 0.5}
    with pytest.raises(ValueError, match=f"^{field}: "):
        gaussian_kl(**given | changes)


# GRPO-Guard


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dims", "std"),
    [
        ((3, 4, 2, 2), 1, 0.4),
        ((3, 8), 1, torch.tensor(0.4)),
        ((3, 8), 1, torch.tensor([0.4, 0.2, 0.8])),
        ((3, 2, 8), 2, torch.tensor([0.4, 0.2, 0.8], dtype=torch.float64)),
        ((3, 2, 4, 2), 2, torch.tensor([[0.4, 0.2], [0.8, 0.3], [0.5, 0.6]])),
        ((3, 2, 8), 2, torch.tensor([[0.4, 0.2]], dtype=torch.bfloat16)),
    ],
)
def test_guard_normalise(dtype: torch.dtype, shape: tuple[int, ...], dims: int, std: float | Tensor) -> None:
    """std (log-ratio + |mean - old mean|^2 / 2 std^2), the square per element, as the log-ratio."""
    log_ratio = normal(*shape[:dims], dtype=dtype, scale=0.1)
    mean, old = normal(*shape, seed=1, dtype=dtype), normal(*shape, seed=2, dtype=dtype).requires_grad_()
    stds = numpy(std) if isinstance(std, Tensor) else np.array(std)
    stds = stds.reshape(stds.shape + (1,) * (dims - stds.ndim))
    square = np.mean((numpy(mean) - numpy(old)).reshape(*shape[:dims], -1) ** 2, axis=-1)
    normalised = guard_normalise(log_ratio, mean, old, std)
    assert normalised.dtype == result_dtype(dtype)
    assert not normalised.requires_grad
    assert close(normalised, stds * (numpy(log_ratio) + square / (2 * stds**2)))


@pytest.mark.parametrize("kind", ["gaussian", "squared_error"])
@pytest.mark.parametrize("std", [0.05, 0.4, 3.0])
def test_guarded_ratios_are_centred_and_free_of_the_std(kind: str, std: float) -> None:
    """What is left is <eps, mean - old mean>: odd in the noise, with the gradient eps / D whatever the std."""
    old, delta, eps = normal(2, 3, 4), normal(2, 3, 4, seed=1, scale=0.1), normal(2, 3, 4, seed=2)

    def guarded(mean: Tensor, noise: Tensor) -> Tensor:
        sample = old + std * noise

        def log_prob(at: Tensor) -> Tensor:
            error = (sample - at).square().flatten(1).mean(1)
            return -error / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2 if kind == "gaussian" else -error

        difference = log_prob(mean) - log_prob(old)
        return guard_normalise(difference if kind == "gaussian" else difference / (2 * std**2), mean, old, std)

    inner = np.mean((numpy(eps) * numpy(delta)).reshape(2, -1), axis=1)
    assert close(guarded(old + delta, eps), inner)
    assert close(guarded(old + delta, -eps), -inner)
    assert close(guarded(old, eps), np.zeros(2))
    assert close(autograd(lambda mean: guarded(mean, eps).sum(), old + delta), numpy(eps) / 12)

    def loss(mean: Tensor) -> Tensor:
        terms = flow_grpo_loss(guarded(mean, eps), torch.zeros(2), torch.tensor([1.0, -0.5]), clip_range=10.0 / 11)
        return terms.loss

    assert np.allclose(numpy(autograd(loss, old + delta)), finite_differences(loss, old + delta), atol=1e-8)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("log_ratio", {"log_ratio": torch.tensor(0.0)}),
        ("log_ratio", {"log_ratio": torch.zeros(3)}),
        ("log_ratio", {"log_ratio": torch.zeros(2, 3, 1)}),
        ("mean", {"log_ratio": torch.zeros(2, 3)}),
        ("old_mean", {"old_mean": torch.zeros(2, 4)}),
        *(("noise_std", {"noise_std": value}) for value in BAD_STDS),
        ("noise_std", {"noise_std": torch.ones(2, 3)}),
    ],
)
def test_guard_of_bad_arguments(field: str, changes: dict[str, Any]) -> None:
    given = {"log_ratio": torch.zeros(2), "mean": torch.zeros(2, 3), "old_mean": torch.zeros(2, 3), "noise_std": 0.5}
    with pytest.raises(ValueError, match=f"^{field}: "):
        guard_normalise(**given | changes)


SIGMAS = [0.97, 0.9, 0.6, 0.55, 0.2, 0.0]


@pytest.mark.parametrize("steps", [None, [1], (0, 3), [4, 2, 2]])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("given", ["numbers", *DTYPES])
def test_guard_step_weights(steps: Any, normalise: bool, given: Any) -> None:
    sigmas = SIGMAS if given == "numbers" else torch.tensor(SIGMAS, dtype=given, requires_grad=True)
    levels = np.array(SIGMAS) if isinstance(sigmas, list) else numpy(sigmas)
    expected = np.array([1 / (levels[k] - levels[k + 1]) for k in (range(5) if steps is None else steps)])
    weights = guard_step_weights(sigmas, steps, normalise=normalise)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert close(weights, expected / expected.mean() if normalise else expected)


def test_guard_evens_out_the_gradient_by_the_velocity() -> None:
    """In `sde`, where the std differs from step to step: of one size for all steps, only with the weights."""
    x, velocity, eps = normal(1, 8), normal(1, 8, seed=1), normal(1, 8, seed=2)

    def slope(step: int) -> Tensor:
        sigma, sigma_next = SIGMAS[step], SIGMAS[step + 1]
        old, std = reference.mean_and_std("sde", x, velocity, sigma, sigma_next, SIGMAS[1], 0.7)
        sample = old + std * eps

        def guarded(v: Tensor) -> Tensor:
            mean, _ = reference.mean_and_std("sde", x, v, sigma, sigma_next, SIGMAS[1], 0.7)
            log_ratio = reference.log_prob(sample, mean, std, "gaussian") - reference.log_prob(
                sample, old, std, "gaussian"
            )
            return guard_normalise(log_ratio, mean, old, std).sum()

        return autograd(guarded, velocity)

    slopes = torch.stack([slope(step) for step in range(5)])
    weighted = slopes * guard_step_weights(SIGMAS, normalise=False).double().view(-1, 1, 1)
    assert close(weighted, np.broadcast_to(-(1 + 0.7**2 / 2) * numpy(eps) / 8, (5, 1, 8)), rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "sigmas", "steps"),
    [
        *(("sigmas", value, None) for value in ([], [1.0], [0.0, 1.0], [1.0, 0.5, 0.5], [1.0, math.nan, 0.0])),
        *(("sigmas", value, None) for value in ([math.inf, 1.0, 0.0], [[1.0, 0.0]], torch.tensor(1.0))),
        *(("steps", [1.0, 0.5, 0.0], value) for value in ([], [2], [-1], [0, 5])),
    ],
)
def test_guard_weights_of_bad_arguments(field: str, sigmas: Any, steps: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        guard_step_weights(sigmas, steps)


def test_guarded_loss_over_samples_and_steps() -> None:
    """As a whole: weights times advantages, zeros as the old log-probs, against the sum written out."""
    log_ratio, std = normal(3, 2, scale=0.05), torch.tensor([[0.3, 0.6]], dtype=torch.float64)
    mean, old = normal(3, 2, 8, seed=1, scale=0.1), normal(3, 2, 8, seed=2, scale=0.1)
    advantages, weights = normal(3, seed=3), guard_step_weights(SIGMAS, [1, 3]).double()
    terms = flow_grpo_loss(
        guard_normalise(log_ratio, mean, old, std),
        torch.zeros(3, 2),
        advantages[:, None] * weights,
        clip_range=0.02,
    )
    expected = 0.0
    for sample, step in np.ndindex(3, 2):
        s, d = (0.3, 0.6)[step], numpy(mean)[sample, step] - numpy(old)[sample, step]
        ratio = math.exp(s * (float(log_ratio[sample, step]) + float(np.mean(d**2)) / (2 * s * s)))
        weight, a = (2 * 0.35 / 0.65, 2 * 0.3 / 0.65)[step], float(advantages[sample])
        expected -= weight * min(ratio * a, min(max(ratio, 0.98), 1.02) * a) / 6
    assert close(terms.loss, expected, rtol=1e-6)
    assert 0 < terms.clip_fraction < 1
