"""Samples depend on their own seeds and settings: not on their group, on other rollouts, or on where they start."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.conftest import ServerPool
from tests.parity.test_exactness import EVERY_FAMILY, FAST_FAMILY, PROMPT, negative
from trainer_client import Prompt, RolloutClient, Sample, StartState, Trajectory

INVARIANT = {"batch_invariant": True, "max_batch_rows": 8}


def rows_equal(one: Trajectory, row: int, other: Trajectory, other_row: int) -> bool:
    return torch.equal(one.latents[row], other.latents[other_row]) and torch.equal(
        one.log_probs[row], other.log_probs[other_row]
    )


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_group_equals_its_samples_alone(family: str, server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(family).target) as client:
        group = client.generate(PROMPT, samples_per_prompt=4, seed=20, **negative(family)).collect()
        alone = [client.generate(PROMPT, seed=20 + i, **negative(family)).collect() for i in range(4)]
    for i, single in enumerate(alone):
        assert torch.allclose(group.latents[i], single.latents[0], atol=1e-4)
        assert torch.allclose(group.log_probs[i], single.log_probs[0], atol=1e-4)
    assert len({tuple(row.flatten().tolist()) for row in group.latents[:, -1]}) == 4


def test_a_group_equals_its_samples_alone_bit_for_bit_when_batch_invariant(server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(FAST_FAMILY, **INVARIANT).target) as client:
        group = client.generate([PROMPT, "blue square center"], samples_per_prompt=4, seed=20).collect()
        for prompt, first in ((PROMPT, 0), ("blue square center", 4)):
            for i in range(first, first + 4):
                single = client.generate(prompt, seed=20 + i).collect()
                assert rows_equal(group, i, single, 0)


@pytest.mark.parametrize("noise_mode", ["keyed", "sequential"])
def test_seeds_decide(noise_mode: str, server_pool: ServerPool) -> None:
    samples = (Sample(1), Sample(2), Sample(1))
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        trajectory = client.generate([Prompt(PROMPT, samples)], noise_mode=noise_mode).collect()
    assert trajectory.seeds == (1, 2, 1)
    assert torch.allclose(trajectory.latents[0], trajectory.latents[2], atol=1e-5)
    for k in range(5):
        assert not torch.allclose(trajectory.latents_at(k)[0], trajectory.latents_at(k)[1], atol=1e-2)


def test_initial_noise_seed_shares_x0_only(server_pool: ServerPool) -> None:
    samples = tuple(Sample(seed, initial_noise_seed=7) for seed in (1, 2, 7))
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        shared = client.generate([Prompt(PROMPT, samples)]).collect()
        short = client.generate(PROMPT, samples_per_prompt=2, seed=1, initial_noise_seed=7).collect()
        own = client.generate(PROMPT, seed=7).collect()
    assert torch.equal(shared.latents_at(0), own.latents_at(0).expand(3, -1, -1, -1))
    assert short.seeds == (1, 2)
    assert torch.allclose(short.latents, shared.latents[:2], atol=1e-5)
    for k in range(1, 5):
        rows = shared.latents_at(k)
        assert not torch.allclose(rows[0], rows[1], atol=1e-2)
        assert torch.allclose(rows[2], own.latents_at(k)[0], atol=1e-5)


def test_two_prompts_do_not_mix(server_pool: ServerPool) -> None:
    prompts = [PROMPT, "green cross bottom right"]
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        both = client.generate(prompts, samples_per_prompt=2, seed=0).collect()
        for i, prompt in enumerate(prompts):
            one = client.generate(prompt, samples_per_prompt=2, seed=2 * i).collect()
            assert torch.allclose(both.latents[2 * i : 2 * i + 2], one.latents, atol=1e-4)
    assert both.prompts == (PROMPT, PROMPT, prompts[1], prompts[1])
    assert both.prompt_indices == (0, 0, 1, 1)


MIXED = [
    {"num_steps": 3, "dynamics": "sde", "seed": 1},
    {"num_steps": 20, "dynamics": "ode", "seed": 2},
    {"num_steps": 8, "dynamics": "cps", "seed": 3},
    {"num_steps": 12, "dynamics": "dance", "seed": 4},
    {"num_steps": 20, "dynamics": "sde", "seed": 5, "stochastic_step_indices": [1, 5]},
    {"num_steps": 16, "dynamics": "cps", "seed": 6, "noise_level": 0.3},
    {"num_steps": 10, "dynamics": "ode", "seed": 7, "guidance_scale": 2.0},
    {"num_steps": 18, "dynamics": "dance", "seed": 8, "sigmas": torch.linspace(1, 0, 19).tolist()},
]


@pytest.mark.parametrize("invariant", [False, True])
def test_rollouts_that_run_together_equal_rollouts_alone(invariant: bool, server_pool: ServerPool) -> None:
    server = server_pool(FAST_FAMILY, **(INVARIANT if invariant else {}))
    with RolloutClient(server.target) as client:
        alone = [client.generate(PROMPT, **settings).collect() for settings in MIXED]
        before = client.status()

        def staggered(position: int) -> Trajectory:
            time.sleep(0.004 * position)
            return client.generate(PROMPT, **MIXED[position]).collect()

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(staggered, range(8)))
        after = client.status()
    for one, other in zip(alone, together, strict=True):
        assert one.latents_indices == other.latents_indices
        if invariant:
            assert rows_equal(one, 0, other, 0)
        else:
            assert torch.allclose(one.latents, other.latents, atol=1e-4)
            assert torch.allclose(one.log_probs, other.log_probs, atol=1e-4)
    calls, serial = after.denoiser_calls - before.denoiser_calls, after.pipeline_calls - before.pipeline_calls
    assert serial == sum(settings["num_steps"] for settings in MIXED)
    assert calls <= 0.4 * serial


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("noise_mode", ["keyed", "sequential"])
def test_any_sample_resumes_from_any_step_bit_for_bit(family: str, noise_mode: str, server_pool: ServerPool) -> None:
    settings: dict[str, Any] = {"num_steps": 4, "noise_mode": noise_mode, **negative(family)}
    with RolloutClient(server_pool(family).target) as client:
        whole = client.generate(PROMPT, seed=9, **settings).collect()
        for k in range(4):
            resumed = client.generate(
                [Prompt(PROMPT, (Sample(9, start=whole.start_state(0, k)),), **negative(family))],
                **{name: value for name, value in settings.items() if name != "negative_prompt"},
            ).collect()
            assert torch.equal(resumed.latents[0, k:], whole.latents[0, k:])
            assert torch.equal(resumed.log_probs[0, k:], whole.log_probs[0, k:])
            assert resumed.latents[0, :k].isnan().all()
            assert resumed.policy_versions[0].tolist() == [-1] * k + [0] * (4 - k)


@pytest.mark.parametrize("dynamics", ["sde", "cps", "dance", "ode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_of_one_rollout_resume_from_different_steps(
    dynamics: str, dtype: torch.dtype, server_pool: ServerPool
) -> None:
    with RolloutClient(server_pool(FAST_FAMILY, **INVARIANT).target) as client:
        whole = client.generate(PROMPT, samples_per_prompt=3, seed=4, dynamics=dynamics, latents_dtype=dtype).collect()
        samples = tuple(Sample(4 + i, start=whole.start_state(i, k)) for i, k in enumerate((1, 3, 2)))
        resumed = client.generate(
            [Prompt(PROMPT, samples)], dynamics=dynamics, latents_dtype=dtype, sigmas=whole.sigmas.tolist()
        ).collect()
    for i, k in enumerate((1, 3, 2)):
        assert torch.equal(resumed.latents[i, k:], whole.latents[i, k:])


def test_branches_share_their_prefix_and_part_after_it(server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        trunk = client.generate(PROMPT, seed=1).collect()
        start = trunk.start_state(0, 2)
        tree = client.generate([Prompt(PROMPT, tuple(Sample(seed, start=start) for seed in (50, 51, 52)))]).collect()
    assert torch.equal(tree.latents_at(2), start.latents.expand(3, -1, -1, -1))
    assert not torch.allclose(tree.latents_at(3)[0], tree.latents_at(3)[1], atol=1e-2)
    assert not torch.allclose(tree.latents_at(4)[1], tree.latents_at(4)[2], atol=1e-2)


SELECTIONS = [
    ("all", [0, 1, 2, 3, 4, 5]),
    ("stochastic", [1, 2, 4, 5]),
    ("final", [5]),
    ("none", []),
    ([0, 3, 5], [0, 3, 5]),
    ([], []),
]


@pytest.mark.parametrize(("selection", "promised"), SELECTIONS)
def test_exactly_the_promised_indices_come_back(selection: Any, promised: list[int], server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        chosen = {"num_steps": 5, "stochastic_step_indices": [1, 4], "seed": 3}
        everything = client.generate(PROMPT, **chosen).collect()
        trajectory = client.generate(PROMPT, latents=selection, **chosen).collect()
    assert list(trajectory.latents_indices) == promised
    for k in promised:
        assert torch.equal(trajectory.latents_at(k), everything.latents_at(k))
    assert trajectory.latents.shape[1] == len(promised)
    assert trajectory.stochastic_steps == (1, 4)
    assert torch.equal(trajectory.log_probs, everything.log_probs)
    assert [k for k in range(5) if trajectory.noise_std[k] > 0] == [1, 4]


def test_cps_has_no_log_prob_in_its_last_step(server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        trajectory = client.generate(PROMPT, dynamics="cps", num_steps=4, latents="stochastic").collect()
    assert trajectory.stochastic_steps == (0, 1, 2)
    assert trajectory.latents_indices == (0, 1, 2, 3)


def test_noise_level_zero_runs_as_ode(server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        ode = client.generate(PROMPT, dynamics="ode", seed=2).collect()
        for dynamics in ("sde", "dance", "cps"):
            zero = client.generate(
                PROMPT, dynamics=dynamics, noise_level=0.0, log_prob_kind="squared_error", seed=2
            ).collect()
            assert torch.equal(zero.latents, ode.latents)
            assert zero.stochastic_steps == ()


def test_sharing_an_ode_prefix(server_pool: ServerPool) -> None:
    """Deterministic first steps once, then branches: equals rollouts that run them each (equal x_0)."""
    sampling = {"num_steps": 5, "stochastic_step_indices": [3, 4]}
    with RolloutClient(server_pool(FAST_FAMILY, **INVARIANT).target) as client:
        each = client.generate(
            [Prompt(PROMPT, tuple(Sample(s, initial_noise_seed=0) for s in (1, 2)))], **sampling
        ).collect()
        start = StartState(3, each.latents_at(3)[0])
        shared = client.generate(
            [Prompt(PROMPT, tuple(Sample(s, initial_noise_seed=0, start=start) for s in (1, 2)))], **sampling
        ).collect()
    assert torch.equal(shared.latents[:, 3:], each.latents[:, 3:])


@pytest.mark.slow
def test_a_reader_that_stops_slows_nobody_and_memory_stays_bounded(server_pool: ServerPool) -> None:
    import psutil

    server = server_pool(FAST_FAMILY, stream_buffer_bytes=1 << 20, max_steps=20000)
    engine = psutil.Process(server.server.engine.pid)
    with RolloutClient(server.target) as client, RolloutClient(server.target) as other:
        lazy = iter(client.generate(PROMPT, num_steps=20000, debug=["mean", "noise", "velocity"]))
        next(lazy)
        deadline = time.monotonic() + 60
        while other.status().parked_samples == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert other.status().parked_samples == 1
        calls = other.status().denoiser_calls
        resident = engine.memory_info().rss
        for _ in range(3):
            assert not other.generate(PROMPT, num_steps=10).collect().errors
        assert other.status().denoiser_calls == calls + 30
        assert other.status().parked_samples == 1
        assert engine.memory_info().rss < resident * 1.05 + (8 << 20)
        lazy.close()
        while other.status().running_samples and time.monotonic() < deadline:
            time.sleep(0.05)
        assert other.status().running_samples == 0


@pytest.mark.slow
def test_a_parked_sample_goes_on_when_its_reader_does(server_pool: ServerPool) -> None:
    server = server_pool(FAST_FAMILY, stream_buffer_bytes=1 << 20, max_steps=20000)
    settings = {"num_steps": 1500, "debug": ["mean", "velocity"], "seed": 3}
    with RolloutClient(server.target) as client:
        events = []
        for event in client.generate(PROMPT, **settings):
            if not events:
                time.sleep(1.5)
            events.append(event)
        assert type(events[-1]).__name__ == "Finished"


def test_dropping_a_stream_frees_the_engine_at_the_next_step(server_pool: ServerPool) -> None:
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        stream = client.generate(PROMPT, num_steps=1000, latents="none")
        for event in stream:
            if type(event).__name__ == "Step":
                break
        stream.cancel()
        deadline = time.monotonic() + 10
        while client.status().running_samples and time.monotonic() < deadline:
            time.sleep(0.01)
        status = client.status()
        assert status.running_samples == 0
        assert status.open_streams == 0
        calls = status.denoiser_calls
        threading.Event().wait(0.2)
        assert client.status().denoiser_calls == calls


CONDITIONING = {
    "sd3": [{"encoder_hidden_states": 2, "pooled_projections": 2}],
    "flux": [{"encoder_hidden_states": 1, "pooled_projections": 1, "guidance": 1, "txt_ids": None, "img_ids": None}],
    "qwen_image": [{"encoder_hidden_states": 1}] * 2,
    "wan": [{"encoder_hidden_states": 1}] * 2,
}


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("samples", [1, 3])
def test_conditioning_is_one_samples_rows_of_each_denoiser_call(
    family: str, samples: int, server_pool: ServerPool
) -> None:
    """By denoiser call of a step: the batched arguments with their rows, and the shared ones (None)."""
    with RolloutClient(server_pool(family).target) as client:
        trajectory = client.generate(
            PROMPT, samples_per_prompt=samples, conditioning=True, num_steps=2, **negative(family)
        ).collect()
    calls: dict[int, dict[str, int | None]] = {}
    for entry in trajectory.conditioning[0]:
        if isinstance(entry.value, torch.Tensor):
            rows = len(entry.value) if entry.batched else None
            assert rows in (None, entry.rows_per_sample)
            calls.setdefault(entry.call_index, {})[entry.name] = rows
    assert [calls[index] for index in sorted(calls)] == CONDITIONING[family]
