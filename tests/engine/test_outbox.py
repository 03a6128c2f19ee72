"""What leaves the engine: samples that fail alone, and the account of a stream's buffer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from rollout_service.engine.outbox import HostCopy, Outbox, RolloutProgress, SessionEndItem, StepItem
from rollout_service.engine.spec import PromptSpec, RolloutSpec, SampleSpec
from rollout_service.scheduler import RolloutArgs

Sent = list[tuple[str, dict[str, Any], list[torch.Tensor]]]


def spec(samples: int, media: Any = "raw") -> RolloutSpec:
    return RolloutSpec(
        rollout_id="r",
        prompts=(PromptSpec("a", None),),
        samples=tuple(SampleSpec(0, seed, None, 0, False) for seed in range(samples)),
        args=RolloutArgs(noise_level=0.7),
        num_steps=2,
        call_arguments={},
        latents="all",
        media=media,
        conditioning=False,
        buffer_bytes=100,
    )


def send_all(*items: Any) -> tuple[Sent, list[tuple[str, int]]]:
    """What an outbox sends for the items, and which samples it reports as failed."""
    sent: Sent = []
    failed: list[tuple[str, int]] = []
    outbox = Outbox(
        lambda kind, fields, tensors=(): sent.append((kind, fields, list(tensors))), lambda *what: failed.append(what)
    )
    for item in items:
        outbox.put(item)
    outbox.close()
    assert "outbox" not in {thread.name for thread in threading.enumerate()}
    return sent, failed


def step(rollout: RolloutProgress, k: int, finite: list[bool]) -> StepItem:
    rows = len(finite)
    latents = torch.arange(rows * 3.0).view(rows, 3) + 10 * k
    return StepItem(
        rollout,
        tuple(range(rows)),
        36,
        k,
        0.5,
        0,
        HostCopy(torch.arange(float(rows))),
        HostCopy(torch.tensor(finite)),
        (("latents", k + 1, HostCopy(latents)),),
    )


def end(rollout: RolloutProgress, rows: int, **outcome: Any) -> SessionEndItem:
    return SessionEndItem(rollout, tuple(range(rows)), 2, **outcome)


def of_kind(sent: Sent, kind: str) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
    return [(fields, tensors) for name, fields, tensors in sent if name == kind]


def test_a_non_finite_sample_ends_alone_and_the_rows_of_the_others_stay_theirs() -> None:
    rollout = RolloutProgress(spec(3, "none"), 1)
    sent, failed = send_all(
        step(rollout, 0, [True, True, True]), step(rollout, 1, [True, False, True]), end(rollout, 3)
    )
    assert failed == [("r", 1)]
    first, second = of_kind(sent, "steps")
    assert first[0]["samples"] == [0, 1, 2]
    assert second[0]["samples"] == [0, 2]
    assert second[0]["log_prob"] == [0.0, 2.0]
    assert second[1][0].tolist() == [[10.0, 11.0, 12.0], [16.0, 17.0, 18.0]]
    ends = [
        (fields["sample"], fields["error"] and fields["error"][0]) for fields, _ in of_kind(sent, "sample_finished")
    ]
    assert ends == [(1, "NON_FINITE"), (0, None), (2, None)]
    assert sent[-1][0] == "finished"


def test_media_that_are_not_finite_end_their_sample_alone() -> None:
    rollout = RolloutProgress(spec(2), 1)
    media, finite = torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.tensor([True, False])
    sent, _ = send_all(end(rollout, 2, media=HostCopy(media), media_finite=HostCopy(finite), account_bytes=96))
    errors = [fields["error"] for fields, _ in of_kind(sent, "sample_finished")]
    assert errors[0] is None
    assert errors[1][0] == "NON_FINITE"


@pytest.mark.parametrize("failing", [[], [0], [1], [0, 1]])
def test_every_byte_that_was_counted_comes_back(failing: list[int]) -> None:
    """Or the stream's buffer would stay full, and the rollout would never end."""
    rollout = RolloutProgress(spec(2), 1)
    media, finite = torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.tensor([True, True])
    sent, _ = send_all(
        step(rollout, 0, [row not in failing for row in range(2)]),
        end(rollout, 2, media=HostCopy(media), media_finite=HostCopy(finite), account_bytes=96),
    )
    assert sum(fields.get("account_bytes", 0) for _, fields, _ in sent) == 36 + 96
