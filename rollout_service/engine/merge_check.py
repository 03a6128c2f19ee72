"""The start-up check of the merge table: two different calls, apart and merged, must agree."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from rollout_service.models.loading import PipelineFacts
from rollout_service.models.merge_table import MERGE_TABLE, MergeRule
from rollout_service.scheduler import RolloutArgs
from rollout_service.scheduler.pipeline import LATENTS_ARGUMENT, denoisers

from .batching import DenoiserCall, ForwardCounts, run_calls
from .prompt_cache import PromptCache
from .session import Session, SessionSamples
from .spec import PromptSpec, RolloutSpec, SampleSpec

#: Largest difference between a row alone and merged, relative to the output's largest value.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def verify_merging(pipe: DiffusionPipeline, facts: PipelineFacts) -> tuple[dict[str, MergeRule], dict[str, str]]:
    """Which components can be merged, and why the others cannot.

    Returns:
        The verified rule by component, and the reason by component for those that run unmerged.
    """
    rules: dict[str, MergeRule] = {}
    reasons: dict[str, str] = {}
    calls = _first_calls(pipe, facts)
    for component, module in denoisers(pipe).items():
        rule = MERGE_TABLE.get(type(module).__name__)
        call = calls.get(component)
        if rule is None:
            reasons[component] = f"{type(module).__name__} is not in the merge table"
        elif call is None:
            reasons[component] = "the check's rollout did not call it"
        elif problem := _check(call, rule):
            reasons[component] = problem
        else:
            rules[component] = rule
    return rules, reasons


@torch.no_grad()
def _first_calls(pipe: DiffusionPipeline, facts: PipelineFacts) -> dict[str, DenoiserCall]:
    """The first call that a short rollout with the pipeline's defaults makes of each denoiser."""
    spec = RolloutSpec(
        rollout_id="merge-check",
        prompts=(PromptSpec("a red circle", None),),
        samples=(SampleSpec(0, 1, None, 0, False),),
        args=RolloutArgs(dynamics="ode"),
        num_steps=2,
        call_arguments=facts.default_arguments,
        latents="none",
        media="none",
        conditioning=False,
        buffer_bytes=0,
    )
    session = Session(pipe, SessionSamples(spec, 0, (0,), 0, None), PromptCache(0), lambda *_: None)
    calls: dict[str, DenoiserCall] = {}
    try:
        parked = session.advance()
        while parked and session.call is not None:
            calls.setdefault(session.call.component, session.call)
            if len(calls) == len(denoisers(pipe)):
                break
            parked = session.advance(session.call.module(**session.call.arguments))
    finally:
        session.cancel()
    return calls


@torch.no_grad()
def _check(call: DenoiserCall, rule: MergeRule) -> str | None:
    """None if a call merges right with one that differs in every batched argument, else what is wrong."""
    other = DenoiserCall(
        call.component,
        call.module,
        {name: _different(name, value, rule) for name, value in call.arguments.items()},
    )
    signature = call.signature(rule)
    if signature is None:
        return "it is called with arguments that the merge table does not describe"
    if signature != other.signature(rule):
        return "two calls of equal shape got different signatures"
    try:
        apart = [c.module(**c.arguments)[0] for c in (call, other)]
        merged = [
            output[0] for output in run_calls([call, other], rule, call.rows + other.rows, False, ForwardCounts())
        ]
    except Exception as error:  # a module may reject a batch in any way
        return f"a merged call raised {type(error).__name__}: {error}"
    scale = max(float(output.abs().max()) for output in apart)
    difference = max(float((one - two).abs().max()) for one, two in zip(apart, merged, strict=True))
    tolerance = TOLERANCES.get(apart[0].dtype, 1e-4) * max(scale, 1e-3)
    if not difference <= tolerance:
        return f"merged rows differ by {difference:.2e} (allowed {tolerance:.2e})"
    if scale > 0 and float((apart[0] - apart[1]).abs().max()) == 0:
        return "different calls gave equal outputs, so the check proves nothing"
    return None


def _different(name: str, value: Any, rule: MergeRule) -> Any:
    if name not in rule.batched or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if name == LATENTS_ARGUMENT or value.ndim > 1:
        return value.flip(-1)
    return value * 0.5
