"""The client believes nothing: every way in which a stream can be wrong is an IntegrityError."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import rollout_pb2_grpc

from tests.conftest import ServerPool
from trainer_client import IntegrityError, RolloutError, Trajectory, build_request
from trainer_client.events import EventDecoder
from trainer_client.trajectory import TrajectoryBuilder

Responses = list[pb.GenerateRolloutResponse]


@pytest.fixture(scope="module")
def recorded(server_pool: ServerPool) -> tuple[pb.GenerateRolloutRequest, Responses]:
    """A real stream with everything in it, in small events."""
    request = build_request(
        ["red circle top left"],
        samples_per_prompt=2,
        num_steps=3,
        media="png",
        conditioning=True,
        debug=["noise", "mean", "velocity"],
        max_event_bytes=4096,
        stochastic_step_indices=[0, 2],
    )
    with grpc.insecure_channel(server_pool("sd3").target) as channel:
        return request, list(rollout_pb2_grpc.RolloutServiceStub(channel).GenerateRollout(request, timeout=60))


def decode(request: pb.GenerateRolloutRequest, responses: Responses) -> Trajectory:
    decoder, builder = EventDecoder(request), TrajectoryBuilder(request)
    for response in responses:
        for event in decoder.feed(response):
            builder.add(event)
    decoder.end()
    return builder.build()


def test_the_recorded_stream_is_whole(recorded: tuple[pb.GenerateRolloutRequest, Responses]) -> None:
    trajectory = decode(*recorded)
    assert trajectory.noise is not None
    assert trajectory.noise.shape[:2] == (2, 2)
    assert not trajectory.latents.isnan().any()


def renumbered(responses: Responses) -> Responses:
    for sequence, response in enumerate(responses):
        response.sequence = sequence
    return responses


def of_kind(responses: Responses, kind: str) -> Iterator[pb.GenerateRolloutResponse]:
    return (response for response in responses if response.WhichOneof("event") == kind)


def flip_a_byte(responses: Responses) -> Responses:
    tensor = next(r for r in of_kind(responses, "step") if r.step.tensors).step.tensors[0].tensor
    tensor.data = bytes([tensor.data[0] ^ 1]) + tensor.data[1:]
    return responses


def change_a_log_prob(responses: Responses) -> Responses:
    step = next(s for r in of_kind(responses, "step") for s in r.step.steps if s.HasField("log_prob"))
    step.log_prob += 1e-6
    return responses


def log_prob_of_a_deterministic_step(responses: Responses) -> Responses:
    step = next(s for r in of_kind(responses, "step") for s in r.step.steps if not s.HasField("log_prob"))
    step.log_prob = 0.0
    return responses


def nan_log_prob(responses: Responses) -> Responses:
    step = next(s for r in of_kind(responses, "step") for s in r.step.steps if s.HasField("log_prob"))
    step.log_prob = float("nan")
    return responses


def drop_an_event(responses: Responses) -> Responses:
    del responses[len(responses) // 2]
    return responses


def drop_a_step_event(responses: Responses) -> Responses:
    responses.remove(next(of_kind(responses, "step")))
    return renumbered(responses)


def duplicate_an_event(responses: Responses) -> Responses:
    position = responses.index(next(of_kind(responses, "step")))
    responses.insert(position, copy.deepcopy(responses[position]))
    return renumbered(responses)


def cut(responses: Responses) -> Responses:
    return responses[:-1]


def other_seed(responses: Responses) -> Responses:
    responses[0].accepted.samples[0].seed += 1
    return responses


def short_schedule(responses: Responses) -> Responses:
    next(of_kind(responses, "started")).started.sigmas.pop()
    return responses


def other_stochastic_steps(responses: Responses) -> Responses:
    next(of_kind(responses, "started")).started.stochastic_step_indices.append(1)
    return responses


def wrong_sample_digest(responses: Responses) -> Responses:
    next(r for r in of_kind(responses, "sample_finished") if r.sample_finished.last).sample_finished.digest ^= 1
    return responses


def wrong_total_digest(responses: Responses) -> Responses:
    responses[-1].finished.digest ^= 1
    return responses


def wrong_count(responses: Responses) -> Responses:
    responses[-1].finished.num_steps += 1
    return responses


def missing_sample_end(responses: Responses) -> Responses:
    responses.remove(next(r for r in of_kind(responses, "sample_finished") if r.sample_finished.last))
    return renumbered(responses)


def started_missing(responses: Responses) -> Responses:
    responses.remove(next(of_kind(responses, "started")))
    return renumbered(responses)


def event_after_the_end(responses: Responses) -> Responses:
    responses.append(copy.deepcopy(responses[-1]))
    return renumbered(responses)


def part_with_another_shape(responses: Responses) -> Responses:
    part = next(r.conditioning for r in of_kind(responses, "conditioning") if r.conditioning.tensor.offset)
    part.tensor.shape[0] += 1
    return responses


def unknown_sample(responses: Responses) -> Responses:
    next(t for r in of_kind(responses, "step") for t in r.step.tensors).sample_index = 9
    return responses


FAULTS: list[Callable[[Responses], Responses]] = [
    flip_a_byte,
    change_a_log_prob,
    log_prob_of_a_deterministic_step,
    nan_log_prob,
    drop_an_event,
    drop_a_step_event,
    duplicate_an_event,
    cut,
    other_seed,
    short_schedule,
    other_stochastic_steps,
    wrong_sample_digest,
    wrong_total_digest,
    wrong_count,
    missing_sample_end,
    started_missing,
    event_after_the_end,
    part_with_another_shape,
    unknown_sample,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_stream_is_refused(
    fault: Callable[[Responses], Responses], recorded: tuple[pb.GenerateRolloutRequest, Responses]
) -> None:
    request, responses = recorded
    with pytest.raises(IntegrityError):
        decode(request, fault(copy.deepcopy(responses)))


def test_save_and_load(recorded: tuple[pb.GenerateRolloutRequest, Responses], tmp_path: Path) -> None:
    trajectory = decode(*recorded)
    trajectory.save(tmp_path / "t.safetensors")
    loaded = Trajectory.load(tmp_path / "t.safetensors")
    for name in ("sigmas", "latents", "log_probs", "noise_std", "policy_versions", "noise", "mean", "velocity"):
        assert torch.equal(getattr(loaded, name), getattr(trajectory, name)), name
    for name in ("request", "accepted", "finished", "errors", "latents_indices", "stochastic_steps", "media"):
        assert getattr(loaded, name) == getattr(trajectory, name), name
    assert loaded.conditioning.keys() == trajectory.conditioning.keys()
    for one, other in zip(loaded.conditioning[0], trajectory.conditioning[0], strict=True):
        assert (one.name, one.batched, one.rows_per_sample) == (other.name, other.batched, other.rows_per_sample)
        assert torch.equal(one.value, other.value) if isinstance(one.value, torch.Tensor) else one.value == other.value
    assert len(loaded.images()) == 2


def test_loading_something_else_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nonsense")
    with pytest.raises(RolloutError, match="safetensors"):
        Trajectory.load(tmp_path / "x")
    with pytest.raises(RolloutError, match="cannot be read"):
        Trajectory.load(tmp_path / "missing")


def test_conditioning_is_what_the_denoiser_received(
    recorded: tuple[pb.GenerateRolloutRequest, Responses], load_family: Callable[..., object]
) -> None:
    """Against the pipeline's own encode_prompt: unconditional row first, as SD3 guides."""
    entries = {entry.name: entry for entry in decode(*recorded).conditioning[0]}
    pipe: object = load_family("sd3")
    with torch.no_grad():
        embeds, negative, pooled, negative_pooled = pipe.encode_prompt(  # type: ignore[attr-defined]
            "red circle top left", None, None, max_sequence_length=64
        )
    assert entries["encoder_hidden_states"].rows_per_sample == 2
    assert torch.equal(entries["encoder_hidden_states"].value, torch.cat([negative, embeds]))
    assert torch.equal(entries["pooled_projections"].value, torch.cat([negative_pooled, pooled]))
