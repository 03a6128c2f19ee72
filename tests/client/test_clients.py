"""Both clients, against a real server."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from tests.conftest import ServerPool
from trainer_client import (
    Accepted,
    AsyncRolloutClient,
    DeadlineExceededError,
    Finished,
    InvalidRequestError,
    Prompt,
    RolloutClient,
    RolloutError,
    Sample,
    SampleFinished,
    Started,
    StartState,
    Step,
    Trajectory,
    UnavailableError,
    build_request,
    replay,
)
from trainer_client.verify import MismatchReport, StepMismatch

PROMPT = "red circle top left"


def test_events_come_in_order_and_step_by_step(server_pool: ServerPool) -> None:
    with RolloutClient(server_pool("sd3").target) as client:
        events = list(client.generate(PROMPT, samples_per_prompt=2, num_steps=3))
    assert isinstance(events[0], Accepted)
    assert isinstance(events[1], Started)
    steps = [event for event in events if isinstance(event, Step)]
    assert [(step.sample_index, step.step_index) for step in steps] == [(i, k) for k in range(3) for i in range(2)]
    assert sorted(steps[0].tensors) == [("latents", 0), ("latents", 1)]
    assert sorted(steps[-1].tensors) == [("latents", 3)]
    assert [type(event) for event in events[-3:]] == [SampleFinished, SampleFinished, Finished]


def test_async_client_equals_sync(server_pool: ServerPool) -> None:
    target = server_pool("sd3").target
    with RolloutClient(target) as client:
        expected = client.generate(PROMPT, seed=4).collect()
        info = client.server_info()

    async def run() -> tuple[list[Trajectory], Any, Any]:
        async with AsyncRolloutClient(target) as client:
            trajectories = await asyncio.gather(*(client.generate(PROMPT, seed=4).collect() for _ in range(3)))
            async with client.generate(PROMPT, num_steps=1000) as stream:
                async for event in stream:
                    if isinstance(event, Step):
                        break
            return trajectories, await client.server_info(), await client.status()

    trajectories, async_info, status = asyncio.run(run())
    assert async_info == info
    assert status.serving
    for trajectory in trajectories:
        assert torch.allclose(trajectory.latents, expected.latents, atol=1e-5)


def test_async_errors_are_typed(server_pool: ServerPool) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(server_pool("sd3").target) as client:
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate(PROMPT, dynamics="ode", noise_level=0.5).collect()
            assert caught.value.field == "sampling.noise_level"
            with pytest.raises(DeadlineExceededError):
                await client.generate(PROMPT, num_steps=1000, timeout=0.3).collect()
        async with AsyncRolloutClient("127.0.0.1:1") as client:
            with pytest.raises(UnavailableError):
                await client.status()

    asyncio.run(run())


def test_values_that_no_request_can_hold_are_refused_here() -> None:
    for settings in (
        {"dynamics": "euler"},
        {"log_prob_kind": "laplace"},
        {"noise_mode": "random"},
        {"latents": "some"},
        {"latents": [-1]},
        {"latents_dtype": torch.complex64},
        {"media": "jpeg"},
        {"debug": ["std"]},
        {"seed": -1},
        {"seed": 1 << 64},
        {"num_steps": "ten"},
        {"height": -8},
        {"arguments": {"image": object()}},
    ):
        with pytest.raises(InvalidRequestError):
            build_request(PROMPT, **settings)
    with pytest.raises(TypeError):
        build_request(PROMPT, nosie_level=0.7)  # type: ignore[call-arg]


def test_replay_of_a_window_needs_and_uses_its_latents_only(server_pool: ServerPool, load_family: Any) -> None:
    with RolloutClient(server_pool("sd3").target) as client:
        settings: dict[str, Any] = {"num_steps": 6, "stochastic_step_indices": [2, 3], "samples_per_prompt": 2}
        window = client.generate(PROMPT, latents="stochastic", **settings).collect()
        nothing = client.generate(PROMPT, latents="final", **settings).collect()
    pipe = load_family("sd3")
    calls = []
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    steps = list(replay(pipe, window, grad=False))
    hook.remove()
    assert [step.step_index for step in steps] == [2, 3]
    assert len(calls) == 2
    for column, step in enumerate(steps):
        assert torch.equal(step.log_prob, window.log_probs[:, column])
    assert list(replay(pipe, nothing)) == []
    with pytest.raises(RolloutError, match="latents='all'"):
        list(replay(pipe, nothing, steps=[2]))


def test_replay_of_a_resumed_sample(server_pool: ServerPool, load_family: Any) -> None:
    with RolloutClient(server_pool("sd3").target) as client:
        whole = client.generate(PROMPT, seed=3).collect()
        start = StartState(2, whole.latents_at(2)[0])
        resumed = client.generate([Prompt(PROMPT, (Sample(3, start=start), Sample(4)))]).collect()
    seen = {}
    for step in replay(load_family("sd3"), resumed, grad=False):
        rows = list(step.sample_indices)
        assert torch.allclose(step.log_prob, resumed.log_probs[rows, step.step_index], atol=1e-5)
        seen.setdefault(step.sample_indices, []).append(step.step_index)
    assert seen == {(0,): [2, 3], (1,): [0, 1, 2, 3]}


def test_the_policy_differs_and_so_does_the_ratio(server_pool: ServerPool, load_family: Any) -> None:
    """Replay is no echo of what was stored: other weights give other log-probs."""
    with RolloutClient(server_pool("sd3").target) as client:
        trajectory = client.generate(PROMPT, seed=3).collect()
    pipe = load_family("sd3")
    with torch.no_grad():
        next(iter(pipe.transformer.parameters())).mul_(1.05)
    differences = [
        float((step.log_prob - trajectory.log_probs[:, step.step_index]).abs().max())
        for step in replay(pipe, trajectory, grad=False)
    ]
    assert min(differences) > 0


def test_the_mismatch_report_does_not_lose_a_nan() -> None:
    """max() of Python forgets it, depending on the order."""
    steps = tuple(StepMismatch(k, 0.5, v, v, None, None) for k, v in enumerate((1e-8, float("nan"), 2e-8)))
    assert math.isnan(MismatchReport(steps, 1).worst("ratio"))
    assert MismatchReport(steps[:1], 1).worst("ratio") == 1e-8
    assert MismatchReport((), 0).worst("latents") == 0.0


@pytest.mark.slow
def test_shared_tensors_are_no_conditioning_of_one_sample(server_pool: ServerPool) -> None:
    """As many text tokens as samples: the ids of FLUX look like a batch, and are none."""
    with RolloutClient(server_pool("flux").target) as client:
        trajectory = client.generate(
            PROMPT, samples_per_prompt=8, conditioning=True, arguments={"max_sequence_length": 8}
        ).collect()
    entries = {entry.name: entry for entry in trajectory.conditioning[0]}
    assert (entries["txt_ids"].batched, list(entries["txt_ids"].value.shape)) == (False, [8, 3])
    assert (entries["encoder_hidden_states"].batched, len(entries["encoder_hidden_states"].value)) == (True, 1)
