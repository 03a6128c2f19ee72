"""Merging and splitting denoiser calls, and the start-up check of the merge table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from rollout_service.engine import merge_check
from rollout_service.engine.batching import DenoiserCall, ForwardCounts, run_calls
from rollout_service.engine.merge_check import verify_merging
from rollout_service.engine.prompt_cache import PromptCache
from rollout_service.models.loading import pipeline_facts
from rollout_service.models.merge_table import MERGE_TABLE, MergeRule
from tests.support.tiny_pipelines import FAMILIES

RULE = MergeRule(frozenset({"hidden_states", "extra"}), shared=frozenset({"ids"}))


class Denoiser(nn.Module):
    """Rows are independent; remembers the rows of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[int] = []

    def forward(
        self,
        hidden_states: torch.Tensor,
        extra: Any = None,
        ids: Any = None,
        mode: Any = None,
        return_dict: bool = True,
    ) -> tuple[torch.Tensor]:
        self.forwards.append(len(hidden_states))
        return (hidden_states * 2 + (extra if extra is not None else 0),)


def call(module: nn.Module, rows: int, value: float = 1.0, **arguments: Any) -> DenoiserCall:
    hidden = torch.full((rows, 3), value) + torch.arange(rows)[:, None]
    return DenoiserCall("transformer", module, {"hidden_states": hidden, "return_dict": False, **arguments})


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("sizes", "max_rows"), [([1], 4), ([2, 3], 8), ([2, 3], 4), ([4, 4], 4), ([9], 4), ([1] * 7, 3)]
)
def test_every_call_gets_its_own_rows(sizes: list[int], max_rows: int, pad: bool) -> None:
    module, counts = Denoiser(), ForwardCounts()
    calls = [call(module, rows, 10.0 * i, extra=torch.full((rows, 3), float(i))) for i, rows in enumerate(sizes)]
    outputs = run_calls(calls, RULE, max_rows, pad, counts)
    for one, output in zip(calls, outputs, strict=True):
        assert torch.equal(output[0], one.module(**one.arguments)[0])
    forwards = module.forwards[: counts.forwards]
    assert max(forwards) <= max_rows
    assert len(forwards) == -(-sum(sizes) // max_rows)
    assert not pad or set(forwards) == {max_rows}
    assert (counts.pipeline_calls, counts.rows) == (len(sizes), sum(sizes))


def test_one_call_that_fits_goes_through_untouched() -> None:
    module = Denoiser()
    one = call(module, 2)
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    run_calls([one], RULE, 8, False, ForwardCounts())
    assert seen[0]["hidden_states"] is one.arguments["hidden_states"]


def test_signatures_tell_what_can_share_a_forward() -> None:
    module = Denoiser()
    ids, same_ids, other_ids = torch.arange(3), torch.arange(3), torch.arange(3) + 1
    base = call(module, 2, ids=ids, mode="a").signature(RULE)
    assert base is not None
    assert base == call(module, 5, 7.0, ids=same_ids, mode="a").signature(RULE)
    assert base != call(module, 2, ids=other_ids, mode="a").signature(RULE)
    assert base != call(module, 2, ids=ids, mode="b").signature(RULE)
    assert base != call(module, 2, ids=ids, mode="a", extra=torch.ones(2, 3)).signature(RULE)
    assert base != call(Denoiser(), 2, ids=ids, mode="a").signature(RULE)
    wide = call(module, 2, ids=ids, mode="a")
    wide.arguments["hidden_states"] = torch.ones(2, 4)
    assert base != wide.signature(RULE)
    half = call(module, 2, ids=ids, mode="a")
    half.arguments["hidden_states"] = half.arguments["hidden_states"].half()
    assert base != half.signature(RULE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"unknown": torch.ones(2, 3)},
        {"mode": object()},
        {"mode": {"nested": torch.ones(1)}},
        {"extra": torch.ones(3, 3)},
        {"return_dict": True},
    ],
    ids=str,
)
def test_calls_that_the_table_does_not_describe_share_with_none(arguments: dict[str, Any]) -> None:
    assert call(Denoiser(), 2, **arguments).signature(RULE) is None


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_merge_table_holds_for_every_family(family: str, load_family: Callable[..., DiffusionPipeline]) -> None:
    pipe = load_family(family)
    rules, reasons = verify_merging(pipe, facts_of(pipe, family))
    assert list(rules) == ["transformer"]
    assert reasons == {}


def facts_of(pipe: DiffusionPipeline, family: str) -> Any:
    return dataclasses.replace(pipeline_facts(pipe, family), default_arguments=dict(FAMILIES[family].call_arguments))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (None, "not in the merge table"),
        (MergeRule(frozenset({"hidden_states"})), "does not describe"),
        (
            MergeRule(
                frozenset({"hidden_states", "timestep", "pooled_projections"}),
                shared=frozenset({"encoder_hidden_states"}),
            ),
            "raised",
        ),
    ],
)
def test_a_class_that_is_unknown_or_wrong_runs_unmerged(
    rule: MergeRule | None, reason: str, load_family: Callable[..., DiffusionPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = dict(MERGE_TABLE)
    del table["SD3Transformer2DModel"]
    if rule is not None:
        table["SD3Transformer2DModel"] = rule
    monkeypatch.setattr(merge_check, "MERGE_TABLE", table)
    pipe = load_family("sd3")
    rules, reasons = verify_merging(pipe, facts_of(pipe, "sd3"))
    assert rules == {}
    assert reason in reasons["transformer"]


def test_a_denoiser_that_mixes_rows_is_found_out(
    load_family: Callable[..., DiffusionPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe: Any = load_family("sd3")
    forward = pipe.transformer.forward

    def mixing(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        (output,) = forward(*args, **kwargs)
        return (output - output.mean(0, keepdim=True),)

    monkeypatch.setattr(pipe.transformer, "forward", mixing)
    rules, reasons = verify_merging(pipe, facts_of(pipe, "sd3"))
    assert rules == {}
    assert "differ" in reasons["transformer"]


def test_calls_without_a_batch_of_latents_have_rows_too() -> None:
    """Z-Image passes a list of latents, and no argument of the usual name."""
    module = nn.Identity()
    assert DenoiserCall("transformer", module, {"x": [torch.ones(3)] * 4, "t": torch.ones(4)}).rows == 4
    assert DenoiserCall("transformer", module, {"t": torch.ones(2)}).rows == 2
    assert DenoiserCall("transformer", module, {"flag": True}).rows == 1


def test_prompt_cache_keeps_nothing_whose_size_it_does_not_know() -> None:
    cache = PromptCache(100)
    cached = cache.wrap(lambda prompt: {"embeds": torch.ones(1000)})
    assert cached("a") is not cached("a")


def test_prompt_cache_remembers_within_its_bound() -> None:
    made: list[str] = []

    def encode_prompt(prompt: str, scale: float = 1.0, embeds: Any = None) -> tuple[torch.Tensor, None]:
        made.append(prompt)
        return torch.full((10,), scale), None

    cache = PromptCache(100)
    cached = cache.wrap(encode_prompt)
    first = cached("a")
    assert cached(prompt="a")[0] is first[0]
    assert cached("a", 2.0)[0][0] == 2
    assert made == ["a", "a"]
    cached("b")  # 120 bytes: the oldest goes
    assert cache.nbytes == 80
    cached("a")
    assert made == ["a", "a", "b", "a"]
    cached("c", embeds=torch.ones(1))
    cached("c", embeds=torch.ones(1))
    assert made[-2:] == ["c", "c"]
    assert (cache.hits, cache.misses) == (1, 4)
