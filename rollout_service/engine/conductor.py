"""The conductor: resumes all sessions until each is parked at a denoiser call, merges the calls that can share a
forward, runs the denoiser, and resumes the sessions with their rows of the result.

Requests with different step counts, sigmas, seeds and dynamics run together; new ones join, and cancelled ones
leave, at any step. Nothing here reads a device value to decide what to do next.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from rollout_service.models.merge_table import MergeRule
from rollout_service.policy.content import LoraSettings, PolicyContent, PolicyContentError, read_content
from rollout_service.policy.live import LivePolicies, PreparedLora, prepare_lora
from rollout_service.scheduler import StepRecord
from rollout_service.scheduler.pipeline import StartLatentsError

from .batching import DenoiserCall, ForwardCounts, run_calls
from .channel import Frame
from .outbox import (
    ConditioningItem,
    HostCopy,
    Outbox,
    RolloutProgress,
    SessionEndItem,
    StartedItem,
    StepItem,
)
from .prompt_cache import PromptCache
from .session import Session, SessionSamples
from .spec import RolloutSpec

#: What a step of a sample costs in a stream's buffer besides its tensors: streams without tensors are bounded too.
STEP_OVERHEAD_BYTES = 64


@dataclass(frozen=True)
class ConductorSettings:
    """How much runs at once."""

    max_batch_rows: int
    max_running_samples: int
    batch_invariant: bool
    prompt_cache_bytes: int


@dataclass
class _Rollout:
    """A rollout that has been submitted and has not ended."""

    spec: RolloutSpec
    progress: RolloutProgress
    waiting: deque[SessionSamples]
    running: list[Session] = field(default_factory=list)
    bytes_under_way: int = 0
    version: int = 0
    """What sessions that have not started will run."""
    failed_samples: set[int] = field(default_factory=set)
    conditioned_prompts: set[int] = field(default_factory=set)


class Conductor:
    """Runs rollouts over one pipeline.

    Args:
        pipe: the pipeline.
        rules: the verified merge rule of each denoiser component; a component without one runs unmerged.
        policies: the policy versions that are loaded.
        settings: how much runs at once.
        send: sends a frame to the frontend (on the outbox's thread).
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        rules: dict[str, MergeRule],
        policies: LivePolicies,
        settings: ConductorSettings,
        send: Callable[..., None],
    ) -> None:
        self._pipe, self._rules, self._policies, self._settings = pipe, rules, policies, settings
        self._commands: queue.SimpleQueue[Frame | _Loaded | None] = queue.SimpleQueue()
        # Files are read and checked, and weights copied to the device, beside the loop.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="policy-loader")
        self._current_version = 0
        # Versions to forget once nothing uses them.
        self._unloading: set[int] = set()
        self._activations: list[_PendingAnswer] = []
        self._outbox = Outbox(send, self._tell_sample_failed)
        self._prompt_cache = PromptCache(settings.prompt_cache_bytes)
        self._rollouts: dict[str, _Rollout] = {}
        self._stopping = False
        self.counts = ForwardCounts()

    def submit(self, frame: Frame | _Loaded | None) -> None:
        """Hand over a command (any thread); None stops the conductor."""
        self._commands.put(frame)

    def run(self) -> None:
        """Run until stopped."""
        with torch.no_grad():
            while not self._stopping:
                self._take_commands(wait=not self._runnable() and not self._can_start())
                self._switch_versions()
                self._start_sessions()
                self._run_parked_calls()
                self._switch_versions()  # now, not when the next command comes
            for rollout_id in list(self._rollouts):
                self._cancel(rollout_id)
        self._loader.shutdown(cancel_futures=True)
        self._outbox.close()

    # -- commands

    def _take_commands(self, wait: bool) -> None:
        while True:
            try:
                frame = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if frame is None:
                self._stopping = True
                return
            if isinstance(frame, _Loaded):
                self._loaded(frame)
                continue
            match frame.kind:
                case "submit":
                    self._submit(frame)
                case "cancel":
                    self._cancel(frame.fields["rollout_id"])
                case "ack":
                    if rollout := self._rollouts.get(frame.fields["rollout_id"]):
                        rollout.bytes_under_way -= frame.fields["nbytes"]
                case "sample_failed":
                    self._sample_failed(frame.fields["rollout_id"], frame.fields["sample"])
                case "status":
                    self._answer(frame.fields["request"], **self._status())
                case "policy_load":
                    self._loader.submit(self._load, **frame.fields)
                case "policy_unload":
                    self._unloading.add(frame.fields["version"])
                case "policy_activate":
                    self._activate(**frame.fields)
                case "policy_fingerprint":
                    fields = frame.fields
                    self._answer(fields["request"], fingerprint=self._policies.fingerprint(fields["version"]))

    def _submit(self, frame: Frame) -> None:
        spec = RolloutSpec.from_fields(frame.fields["spec"])
        start = dict(zip(frame.fields["start_samples"], (raw.tensor for raw in frame.tensors), strict=True))
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for index, sample in enumerate(spec.samples):
            groups.setdefault((sample.prompt_index, sample.start_step, sample.starts_from_latents), []).append(index)
        sessions = deque(
            SessionSamples(
                spec,
                prompt_index,
                tuple(indices),
                start_step,
                torch.stack([start[index] for index in indices]) if given else None,
            )
            for (prompt_index, start_step, given), indices in groups.items()
        )
        progress = RolloutProgress(spec, len(sessions))
        self._rollouts[spec.rollout_id] = _Rollout(spec, progress, sessions, version=spec.policy_version)

    def _cancel(self, rollout_id: str) -> None:
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is None:
            return
        for session in rollout.running:
            session.cancel()
            self._put_end(rollout, session.samples, cancelled=True)
        for samples in rollout.waiting:
            self._put_end(rollout, samples, cancelled=True)

    def _tell_sample_failed(self, rollout_id: str, sample: int) -> None:
        self.submit(Frame("sample_failed", {"rollout_id": rollout_id, "sample": sample}))

    def _sample_failed(self, rollout_id: str, sample: int) -> None:
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return
        rollout.failed_samples.add(sample)
        for session in list(rollout.running):
            if rollout.failed_samples.issuperset(session.samples.sample_indices):
                session.cancel()
                self._end(rollout, session)

    def _status(self) -> dict[str, Any]:
        running = [(r, s) for r in self._rollouts.values() for s in r.running]
        return {
            "queued_samples": sum(len(w.sample_indices) for r in self._rollouts.values() for w in r.waiting),
            "running_samples": sum(len(s.samples.sample_indices) for _, s in running),
            "parked_samples": sum(
                len(s.samples.sample_indices) for r, s in running if self._buffer_is_full(r, s.step_bytes)
            ),
            "denoiser_calls": self.counts.forwards,
            "denoiser_rows": self.counts.rows,
            "pipeline_calls": self.counts.pipeline_calls,
        }

    def _answer(self, request: int, **fields: Any) -> None:
        self._outbox.put_frame("answer", {"request": request, **fields})

    # -- policy versions

    def _load(
        self,
        request: int,
        version: int,
        kind: Literal["full", "lora"],
        path: str,
        lora: dict[str, Any] | None,
        check_values: bool,
        keep: bool,
    ) -> None:
        """Check a file and, if it is to be kept, prepare it; on the loader's thread."""
        outcome: PolicyContent | PreparedLora | Exception
        try:
            settings = LoraSettings(**lora) if lora else None
            content = read_content(Path(path), kind, settings, self._policies.weights, check_values)
            outcome = prepare_lora(content, self._policies.weights) if keep and kind == "lora" else content
        except Exception as error:  # a file of the user's must not end the loader
            outcome = error
        self.submit(_Loaded(request, version, keep, outcome))

    def _loaded(self, loaded: _Loaded) -> None:
        outcome = loaded.outcome
        if isinstance(outcome, PolicyContentError):
            self._answer(loaded.request, problem=str(outcome), lists=outcome.lists)
            return
        if isinstance(outcome, Exception):
            self._answer(loaded.request, problem=f"{type(outcome).__name__}: {outcome}", lists={})
            return
        content = outcome.content if isinstance(outcome, PreparedLora) else outcome
        if loaded.keep:
            self._unloading.discard(loaded.version)
        if loaded.keep and not self._policies.knows(loaded.version):
            if isinstance(outcome, PreparedLora):
                self._policies.add_lora(loaded.version, outcome)
            else:
                self._policies.add_full(loaded.version, outcome)
        self._answer(
            loaded.request,
            bound_tensors=content.bound_tensors,
            expected_tensors=content.expected_tensors,
            fingerprint=self._policies.fingerprint(loaded.version) if loaded.keep else 0,
        )

    def _activate(self, request: int, version: int, mode: str) -> None:
        """Make a version current; answered once its weights are in place, or wait for rollouts in flight."""
        self._current_version = version
        if mode == "next_step":
            for rollout in self._rollouts.values():
                if not rollout.spec.may_switch_to(version):
                    continue
                rollout.version = version
                for session in rollout.running:
                    session.next_version = version if session.policy_version != version else None
        self._activations.append(_PendingAnswer(request, version))

    def _switch_versions(self) -> None:
        """Switch sessions at a step boundary, and put full weights in place where nothing stands against it."""
        self._swap_for_next_step()
        for session in self._sessions():
            version = session.next_version
            if version is None or session.calls_in_step:
                continue
            if self._policies.base_of(version) == self._policies.resident:
                session.policy_version, session.next_version = version, None
        head = self._next_rollout()
        if not self._sessions():
            self._policies.make_resident(self._policies.base_of(head.version if head else self._current_version))
        for pending in self._activations:
            self._answer(pending.request, fingerprint=self._policies.fingerprint(pending.version))
        self._activations.clear()
        self._forget_unused()

    def _forget_unused(self) -> None:
        if not self._unloading:
            return
        used = {rollout.version for rollout in self._rollouts.values()} | {self._current_version}
        for session in self._sessions():
            used |= {session.policy_version, session.next_version or session.policy_version}
        for version in self._unloading - used:
            self._policies.remove(version)
        self._unloading &= used

    def _swap_for_next_step(self) -> None:
        """Swap full weights under sessions that all switch, once all are at a step boundary."""
        base = self._awaited_base()
        if base is not None and all(session.calls_in_step == 0 for session in self._sessions()):
            self._policies.make_resident(base)

    def _awaited_base(self) -> int | None:
        """The base that all running sessions switch to, if it is not resident; None also while one keeps to its own."""
        bases = {None if s.next_version is None else self._policies.base_of(s.next_version) for s in self._sessions()}
        base = bases.pop() if len(bases) == 1 else None
        return base if base != self._policies.resident else None

    def _sessions(self) -> list[Session]:
        return [session for rollout in self._rollouts.values() for session in rollout.running]

    # -- starting and ending sessions

    def _running_samples(self) -> int:
        """Samples that run and are not parked: those of a slow reader must not keep others from starting."""
        return sum(
            len(s.samples.sample_indices)
            for r in self._rollouts.values()
            for s in r.running
            if not self._buffer_is_full(r, s.step_bytes)
        )

    def _can_start(self) -> bool:
        rollout = self._next_rollout()
        if rollout is None:
            return False
        if self._policies.base_of(rollout.version) != self._policies.resident:
            # Full weights take the place of others, which rollouts in flight still use.
            return not self._sessions()
        running = self._running_samples()
        # A group larger than the limit runs alone rather than never.
        return not running or running + len(rollout.waiting[0].sample_indices) <= self._settings.max_running_samples

    def _next_rollout(self) -> _Rollout | None:
        """The first in line whose reader keeps up."""
        return next((r for r in self._rollouts.values() if r.waiting and not self._buffer_is_full(r, 0)), None)

    def _start_sessions(self) -> None:
        """Start waiting groups, in order of arrival, while they fit."""
        while self._can_start():
            rollout = self._next_rollout()
            assert rollout is not None
            self._policies.make_resident(self._policies.base_of(rollout.version))
            session = Session(
                self._pipe, rollout.waiting.popleft(), self._prompt_cache, self._on_step, policy_version=rollout.version
            )
            rollout.running.append(session)
            self._advance(rollout, session)
            if session.call is not None:
                version, sigmas = session.policy_version, session.scheduler.rollout_sigmas
                self._outbox.put(StartedItem(rollout.progress, version, sigmas))

    def _advance(self, rollout: _Rollout, session: Session, output: Any = None) -> None:
        try:
            if session.advance(output):
                return
            self._end(rollout, session)
        except StartLatentsError as error:
            self._reject(rollout, session, str(error))
        except Exception as error:  # whatever a pipeline raises ends its session's samples, and nothing else
            self._end(rollout, session, error=f"{type(error).__name__}: {error}")

    def _reject(self, rollout: _Rollout, session: Session, problem: str) -> None:
        """A start state that only the pipeline could find wrong: the whole request is at fault."""
        fields = {
            "rollout_id": rollout.spec.rollout_id,
            "sample": session.samples.sample_indices[0],
            "problem": problem,
        }
        self._outbox.put_frame("rejected", fields)
        self._cancel(rollout.spec.rollout_id)

    def _end(self, rollout: _Rollout, session: Session, error: str | None = None) -> None:
        rollout.running.remove(session)
        end: dict[str, Any] = {"error": error, "next_step": session.next_step}
        if session.media is not None and session.media_finite is not None:
            nbytes = _nbytes(session.media)
            rollout.bytes_under_way += nbytes
            end |= {"media": HostCopy(session.media), "media_finite": HostCopy(session.media_finite)}
            end["account_bytes"] = nbytes
        self._put_end(rollout, session.samples, **end)
        if not rollout.running and not rollout.waiting:
            self._rollouts.pop(rollout.spec.rollout_id, None)

    def _put_end(self, rollout: _Rollout, samples: SessionSamples, next_step: int = 0, **outcome: Any) -> None:
        self._outbox.put(SessionEndItem(rollout.progress, samples.sample_indices, next_step, **outcome))

    # -- running the denoiser

    @staticmethod
    def _buffer_is_full(rollout: _Rollout, nbytes: int, planned: int = 0) -> bool:
        """Whether the stream's buffer has no room for so many bytes more (an empty one, with nothing planned, has)."""
        under_way = rollout.bytes_under_way
        return under_way + planned > 0 and under_way + nbytes > rollout.spec.buffer_bytes

    def _runnable(self) -> list[tuple[_Rollout, Session]]:
        """Sessions whose next step fits their stream's buffer, together with those of the rollout before them."""
        runnable = []
        # Those that have reached their step boundary wait for full weights until the others have.
        awaiting = self._awaited_base() is not None
        for rollout in self._rollouts.values():
            # A step that has begun goes on: others may wait for its end.
            begun = [session for session in rollout.running if session.call is not None and session.calls_in_step]
            runnable += [(rollout, session) for session in begun]
            planned = sum(session.step_bytes for session in begun)
            for session in rollout.running:
                if session.call is None or session.calls_in_step or awaiting:
                    continue
                if not self._buffer_is_full(rollout, planned + session.step_bytes, planned):
                    runnable.append((rollout, session))
                    planned += session.step_bytes
        return runnable

    def _run_parked_calls(self) -> None:
        groups: dict[Hashable, list[tuple[_Rollout, Session, DenoiserCall]]] = {}
        for rollout, session in self._runnable():
            call = session.call
            assert call is not None
            rule = self._rules.get(call.component)
            signature = call.signature(rule) if rule is not None else None
            key = (session.policy_version, signature) if signature is not None else id(session)
            groups.setdefault(key, []).append((rollout, session, call))
        for group in groups.values():
            outputs = self._run_group(group[0][1].policy_version, [call for _, _, call in group])
            for (rollout, session, _), output in zip(group, outputs, strict=True):
                if isinstance(output, Exception):
                    session.cancel()
                    self._end(rollout, session, error=f"{type(output).__name__}: {output}")
                else:
                    self._advance(rollout, session, output)

    def _run_group(self, version: int, calls: list[DenoiserCall]) -> list[Any]:
        """Outputs of calls that share a forward; an exception in place of the output of a call that raises."""
        rule = self._rules.get(calls[0].component)
        if rule is not None and calls[0].signature(rule) is None:
            rule = None
        limits = (self._settings.max_batch_rows, self._settings.batch_invariant, self.counts)
        try:
            self._policies.use(version)
            return run_calls(calls, rule, *limits)
        except Exception as error:
            if len(calls) == 1:
                return [error]
        # One of them is at fault: run each alone, so that only that one fails.
        return [output for call in calls for output in self._run_group(version, [call])]

    def _on_step(self, session: Session, record: StepRecord) -> None:
        """Hand one step over to the outbox; called from within the pipeline's ``scheduler.step``."""
        rollout = self._rollouts[session.samples.spec.rollout_id]
        k, first = record.step_index, record.step_index == session.samples.start_step
        if session.conditioning_calls:
            # Once per prompt, though samples that start at different steps are different sessions.
            prompt = session.samples.prompt_index
            if prompt not in rollout.conditioned_prompts:
                rollout.conditioned_prompts.add(prompt)
                captured = tuple(session.captured_conditioning())
                nbytes = sum(_nbytes(entry.value) for entry in captured if isinstance(entry.value, Tensor))
                rollout.bytes_under_way += nbytes
                self._outbox.put(ConditioningItem(rollout.progress, prompt, captured, nbytes))
            session.conditioning_calls = []
        wanted = session.wanted_latents
        tensors: list[tuple[str, int, Tensor]] = []
        if first and k in wanted:
            tensors.append(("latents", k, record.sample))
        if k + 1 in wanted:
            tensors.append(("latents", k + 1, record.next_sample))
        for role in ("noise", "mean", "velocity"):
            if (value := getattr(record, role)) is not None:
                tensors.append((role, k, value))
        samples = session.samples.sample_indices
        session.step_bytes = sum(_nbytes(t) for _, _, t in tensors) + STEP_OVERHEAD_BYTES * len(samples)
        session.next_step = k + 1
        rollout.bytes_under_way += session.step_bytes
        finite = torch.isfinite(record.next_sample).flatten(1).all(1)
        if record.log_prob is not None:
            finite &= torch.isfinite(record.log_prob)
        self._outbox.put(
            StepItem(
                rollout.progress,
                samples,
                session.step_bytes,
                k,
                record.noise_std,
                session.policy_version,
                HostCopy(record.log_prob) if record.log_prob is not None else None,
                HostCopy(finite),
                tuple((role, index, HostCopy(tensor)) for role, index, tensor in tensors),
            )
        )


@dataclass(frozen=True)
class _Loaded:
    """What the loader made of a policy file."""

    request: int
    version: int
    keep: bool
    outcome: PolicyContent | PreparedLora | Exception


@dataclass(frozen=True)
class _PendingAnswer:
    """An activation to be answered."""

    request: int
    version: int


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
