from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout_service.scheduler import NoiseSource, initial_generator_seed, step_generator_seed

VECTORS = json.loads((Path(__file__).parents[2] / "proto" / "testdata" / "noise_seeds.json").read_text())
EDGES = (0, 1, 2**32, 2**63, 2**64 - 1)
SHAPE = (3, 4, 5)
u64 = st.integers(0, 2**64 - 1)


def le64(tag: str, *integers: int) -> int:
    """The hash as the protocol states it: LE64(SHA-256(tag || u64le(integer) ...))."""
    message = tag.encode("ascii") + b"".join(integer.to_bytes(8, "little") for integer in integers)
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")


def expected_seed(kind: str, seed: int, step: int | None = None) -> int:
    if kind == "initial":
        return le64("diffusion-rollout/v1/initial-noise", seed)
    assert step is not None
    return le64("diffusion-rollout/v1/step-noise", seed, step)


def normal(generator_seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(generator_seed))


def batch(rows: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.zeros(rows, *shape, dtype=dtype)


def initial(source: NoiseSource, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """x_0 as a pipeline draws it."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in source.initial_generators()])


@given(seed=u64, step=u64)
@settings(deadline=None, derandomize=True, database=None)
def test_hash_follows_the_protocol(seed: int, step: int) -> None:
    assert initial_generator_seed(seed) == expected_seed("initial", seed)
    assert step_generator_seed(seed, step) == expected_seed("step", seed, step)


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: "-".join(str(vector[k]) for k in ("kind", "seed", "step"))
)
def test_published_vectors(vector: dict[str, str | None]) -> None:
    assert set(vector) == {"kind", "seed", "step", "generator_seed"}
    kind, seed, generator_seed = vector["kind"], int(vector["seed"] or ""), int(vector["generator_seed"] or "")
    if kind == "initial":
        assert vector["step"] is None
        assert initial_generator_seed(seed) == expected_seed("initial", seed) == generator_seed
    else:
        assert kind == "step"
        step = int(vector["step"] or "")
        assert step_generator_seed(seed, step) == expected_seed("step", seed, step) == generator_seed


def test_published_vectors_cover_the_edges() -> None:
    given_seeds = {vector["seed"] for vector in VECTORS if vector["kind"] == "initial"}
    assert given_seeds >= {str(edge) for edge in EDGES}
    pairs = {(vector["seed"], vector["step"]) for vector in VECTORS if vector["kind"] == "step"}
    assert pairs >= {(str(seed), str(step)) for seed, step in itertools.product(EDGES, EDGES)}
    assert len({vector["generator_seed"] for vector in VECTORS}) == len(VECTORS)
    # Strings, because JSON numbers above 2^53 are not safe in many languages.
    assert all(value is None or isinstance(value, str) for vector in VECTORS for value in vector.values())


def test_the_protocol_states_the_hash_that_is_tested_here() -> None:
    text = (Path(__file__).parents[2] / "proto" / "diffusion_rollout" / "v1" / "rollout.proto").read_text()
    compact = " ".join(text.split())
    assert 'LE64(SHA-256("diffusion-rollout/v1/step-noise" || u64le(seed) || u64le(k)))' in compact
    assert 'LE64(SHA-256("diffusion-rollout/v1/initial-noise" || u64le(initial_noise_seed or seed)))' in compact


@pytest.mark.parametrize("seed", EDGES)
@pytest.mark.parametrize("step", [0, 1, 99])
def test_keyed_noise_is_a_fresh_generator_per_step(seed: int, step: int) -> None:
    (noise,) = NoiseSource([seed]).draw(step, batch(1))
    assert noise.dtype == torch.float32
    assert torch.equal(noise, normal(expected_seed("step", seed, step)))


@pytest.mark.parametrize("seed", EDGES)
def test_keyed_initial_generators(seed: int) -> None:
    (generator,) = NoiseSource([seed]).initial_generators()
    assert generator.device.type == "cpu"
    assert generator.initial_seed() == expected_seed("initial", seed)
    assert torch.equal(torch.randn(SHAPE, generator=generator), normal(expected_seed("initial", seed)))


def test_seeds_and_steps_give_distinct_noise() -> None:
    seeds = [*range(8), *EDGES[2:]]
    source = NoiseSource(seeds)
    drawn = torch.cat([initial(source), *(source.draw(step, batch(len(seeds))) for step in range(8))]).flatten(1)
    assert len(drawn) == 11 * 9
    # Independent normals of 60 elements; equal or mirrored rows would be correlated.
    correlation = torch.corrcoef(drawn).fill_diagonal_(0)
    assert correlation.abs().max() < 0.7


def test_noise_is_standard_normal() -> None:
    noise = NoiseSource([1]).draw(0, batch(1, shape=(100_000,)))
    assert abs(noise.mean().item()) < 0.02
    assert abs(noise.std().item() - 1) < 0.02


@pytest.mark.parametrize("mode", ["keyed", "sequential"])
def test_noise_does_not_depend_on_the_batch(mode: str) -> None:
    together = NoiseSource([3, 1, 4], mode)
    first, second = together.draw(0, batch(3)), together.draw(1, batch(3))
    reordered = NoiseSource([4, 3], mode)
    assert torch.equal(reordered.draw(0, batch(2)), first[[2, 0]])
    assert torch.equal(reordered.draw(1, batch(2)), second[[2, 0]])


@pytest.mark.parametrize("mode", ["keyed", "sequential"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_noise_does_not_depend_on_the_dtype_of_the_latents(mode: str, dtype: torch.dtype) -> None:
    noise = NoiseSource([3, 1], mode).draw(2, batch(2, dtype))
    assert noise.dtype == torch.float32
    assert torch.equal(noise, NoiseSource([3, 1], mode).draw(2, batch(2)))


@pytest.mark.parametrize("mode", ["keyed", "sequential"])
def test_noise_does_not_depend_on_the_global_random_state(mode: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        noise = NoiseSource([5], mode).draw(0, batch(1))
        state = torch.get_rng_state()
        assert torch.equal(NoiseSource([5], mode).draw(0, batch(1)), noise)
        assert torch.equal(torch.get_rng_state(), state)


@given(order=st.lists(st.integers(0, 20), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_keyed_noise_does_not_depend_on_history(order: list[int]) -> None:
    source = NoiseSource([7, 8])
    source.fast_forward(3, batch(2))
    for step in order:
        assert torch.equal(source.draw(step, batch(2)), NoiseSource([7, 8]).draw(step, batch(2)))
    assert torch.equal(initial(source), initial(NoiseSource([7, 8])))


def test_initial_noise_seeds_replace_the_seed_of_x_0_only() -> None:
    source = NoiseSource([1, 2, 3], initial_noise_seeds=[9, 9, None])
    x_0 = initial(source)
    assert torch.equal(x_0[0], x_0[1])
    assert torch.equal(x_0, initial(NoiseSource([9, 9, 3])))
    assert torch.equal(source.draw(4, batch(3)), NoiseSource([1, 2, 3]).draw(4, batch(3)))


def test_initial_noise_seed_zero_is_a_seed() -> None:
    assert torch.equal(initial(NoiseSource([5], initial_noise_seeds=[0])), initial(NoiseSource([0])))


# Below 16 elements torch draws normals one by one, above in blocks: generators advance differently.
@pytest.mark.parametrize("shape", [(3,), (15,), (17, 1), SHAPE])
def test_sequential_is_one_generator_per_sample(shape: tuple[int, ...]) -> None:
    seeds = [7, 2**64 - 1]
    source = NoiseSource(seeds, "sequential")
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

    def expected() -> Tensor:
        return torch.stack([torch.randn(shape, generator=generator) for generator in generators])

    assert torch.equal(initial(source, shape), expected())
    for step in (1, 2, 5):
        # The step plays no part: the next draw is the next noise.
        assert torch.equal(source.draw(step, batch(2, shape=shape)), expected())


@pytest.mark.parametrize("shape", [(3,), (15,), (17, 1), SHAPE])
@pytest.mark.parametrize("draws", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequential_fast_forward_equals_drawing(shape: tuple[int, ...], draws: int, dtype: torch.dtype) -> None:
    whole, resumed = (NoiseSource([7, 8], "sequential") for _ in range(2))
    assert torch.equal(initial(whole, shape), initial(resumed, shape))
    for step in range(draws):
        whole.draw(step, batch(2, dtype, shape))
    resumed.fast_forward(draws, batch(2, dtype, shape))
    assert torch.equal(whole.draw(draws, batch(2, dtype, shape)), resumed.draw(draws, batch(2, dtype, shape)))


def test_sequential_fast_forward_does_not_depend_on_the_default_dtype() -> None:
    whole, resumed = (NoiseSource([7], "sequential") for _ in range(2))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        whole.draw(0, batch(1))
        resumed.fast_forward(1, batch(1))
        assert torch.equal(whole.draw(1, batch(1)), resumed.draw(1, batch(1)))
    finally:
        torch.set_default_dtype(default)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="noise_mode: 'philox' is unknown; pass one of keyed, sequential"):
        NoiseSource([1], "philox")


def test_initial_noise_seeds_are_one_per_sample() -> None:
    with pytest.raises(ValueError, match="initial_noise_seeds: 1 given for 2 samples; pass one each"):
        NoiseSource([1, 2], initial_noise_seeds=[3])


def test_sequential_takes_no_initial_noise_seed() -> None:
    with pytest.raises(ValueError, match="initial_noise_seed: not with sequential"):
        NoiseSource([1, 2], "sequential", initial_noise_seeds=[None, 3])
    assert torch.equal(
        initial(NoiseSource([1, 2], "sequential", initial_noise_seeds=[None, None])),
        initial(NoiseSource([1, 2], "sequential")),
    )


def test_seeds_must_match_the_batch() -> None:
    with pytest.raises(ValueError, match=r"longer|seeds"):
        NoiseSource([1, 2, 3]).draw(0, batch(2))
