"""The frontend's side of the engine: starts its process, submits rollouts, hands out their frames, and starts it again
when it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from torch import Tensor

from rollout_service.models.loading import ModelError, PipelineFacts

from .channel import AsyncChannel, Frame
from .spec import RolloutSpec

log = structlog.get_logger(__name__)

STATUS_TIMEOUT_SECONDS = 30.0
#: Reading, checking and hashing tens of gigabytes.
POLICY_TIMEOUT_SECONDS = 1800.0
RESTART_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class EngineLostError(Exception):
    """The engine process ended while the rollout ran, or is not up."""


class PolicyActivatedError(Exception):
    """Another policy version was activated in a mode that ends rollouts in flight."""


class DrainingError(Exception):
    """The server stops before the rollout has ended."""


class QueueFullError(Exception):
    """As many samples are queued as may be."""


@dataclass(frozen=True)
class EngineSettings:
    """What the engine process is started with."""

    model: str
    revision: str | None
    dtype: str
    device: str
    threads: int
    """CPU threads of torch; 0 leaves torch's default."""
    max_batch_rows: int
    max_running_samples: int
    max_queued_samples: int
    batch_invariant: bool
    prompt_cache_bytes: int
    start_timeout_seconds: float
    scratch: str
    """A directory for what the engine has to put on disk."""


@dataclass
class EngineStream:
    """The frames of one rollout, in order."""

    rollout_id: str
    num_samples: int
    spec: RolloutSpec
    queue_position: int
    """Samples admitted before it that had not started."""
    _client: EngineClient
    policy_version: int
    """The version that its samples run on, or switch to at their next step."""
    _frames: asyncio.Queue[Frame | Exception] = field(default_factory=asyncio.Queue)
    started: bool = False
    ended: bool = False

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames up to and including ``finished``.

        Raises:
            EngineLostError: the engine process ended.
            DrainingError: the server stops.
            PolicyActivatedError: another version was activated, which ends it.
        """
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Exception):
                raise frame
            yield frame
            if frame.kind == "finished":
                return

    def ack(self, frame: Frame) -> None:
        """Tell the engine that a frame has been passed on, which makes room in the stream's buffer."""
        nbytes = frame.fields.get("account_bytes", 0)
        if nbytes and not self.ended:
            self._client.send("ack", {"rollout_id": self.rollout_id, "nbytes": nbytes})

    def close(self) -> None:
        """Cancel the rollout unless it has ended."""
        if not self.ended:
            self._client.send("cancel", {"rollout_id": self.rollout_id})


class EngineClient:
    """One engine process.

    Args:
        settings: what it is started with.
        on_change: called when the engine comes up (True) or goes down (False).
    """

    def __init__(self, settings: EngineSettings, on_change: Callable[[bool], None] = lambda up: None) -> None:
        self.settings = settings
        self.restarts = 0
        self._on_change = on_change
        self._facts: PipelineFacts | None = None
        self._channel: AsyncChannel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._streams: dict[str, EngineStream] = {}
        self._requests: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._request_ids = itertools.count()
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def facts(self) -> PipelineFacts:
        """The facts of the loaded pipeline; known once started."""
        if self._facts is None:
            raise RuntimeError("the engine has not been started")
        return self._facts

    @property
    def ready(self) -> bool:
        """Whether rollouts can be submitted."""
        return self._channel is not None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def open_streams(self) -> int:
        """Rollouts that have not ended."""
        return len(self._streams)

    async def start(self) -> None:
        """Start the process and wait until the model is loaded and checked.

        Raises:
            ModelError: the model cannot be served.
        """
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self) -> None:
        """End the process; running rollouts are cut."""
        self._stopping = True
        if self._channel is not None:
            self.send("stop", {})
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), timeout=5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def submit(self, spec: RolloutSpec, start_latents: Mapping[int, Tensor]) -> EngineStream:
        """Admit a rollout.

        Args:
            spec: the rollout.
            start_latents: by sample index, x_k in the wire dtype without a batch dimension.

        Raises:
            QueueFullError: no room for its samples.
            EngineLostError: the engine is not up.
        """
        if not self.ready:
            raise EngineLostError("the engine is being restarted")
        outstanding = sum(stream.num_samples for stream in self._streams.values())
        room = self.settings.max_running_samples + self.settings.max_queued_samples - outstanding
        if len(spec.samples) > room:
            raise QueueFullError(f"{outstanding} samples are running or queued; {room} more are admitted now")
        position = sum(stream.num_samples for stream in self._streams.values() if not stream.started)
        stream = EngineStream(spec.rollout_id, len(spec.samples), spec, position, self, spec.policy_version)
        self._streams[spec.rollout_id] = stream
        fields = {"spec": spec.to_fields(), "start_samples": list(start_latents)}
        self.send("submit", fields, tuple(start_latents.values()))
        return stream

    async def status(self) -> dict[str, Any]:
        """Exact counts from the conductor, taken between two forwards.

        Raises:
            EngineLostError: the engine is not up, or busy with one forward for longer than 30 s.
        """
        return await self.request("status", {}, STATUS_TIMEOUT_SECONDS)

    async def request(self, kind: str, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            EngineLostError: the engine is not up, ends, or does not answer in time.
        """
        return await self._send_request(kind, fields, timeout)

    def _send_request(self, kind: str, fields: dict[str, Any], timeout: float) -> Awaitable[dict[str, Any]]:
        """Send a command now; the answer is to be awaited."""
        if not self.ready:
            raise EngineLostError("the engine is being restarted")
        request = next(self._request_ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._requests[request] = future
        future.add_done_callback(lambda _: self._requests.pop(request, None))
        self.send(kind, {"request": request, **fields})
        return _answer(future, timeout)

    def send(self, kind: str, fields: dict[str, Any], tensors: tuple[Tensor, ...] = ()) -> None:
        """Send one command; nothing if the engine is gone, which its streams learn from the supervisor."""
        if self._channel is not None:
            self._channel.send(kind, fields, tensors)

    def end_streams(self, error: Exception) -> None:
        """End all streams with an error, after the frames that have arrived."""
        for stream in self._streams.values():
            stream._frames.put_nowait(error)

    # -- policy versions

    def versions_in_use(self) -> set[int]:
        """The versions that open streams run on."""
        return {stream.policy_version for stream in self._streams.values()}

    async def load_policy(
        self, version: int, kind: str, path: str, lora: dict[str, Any] | None, *, check_values: bool, keep: bool
    ) -> dict[str, Any]:
        """Check a policy file against the denoisers and, if it is to be kept, make it ready to run.

        Args:
            version: its version; loading one that is loaded already changes nothing.
            kind: full or lora.
            path: the safetensors file; one of full weights must stay in place as long as the version is loaded.
            lora: fields of :class:`~rollout_service.policy.content.LoraSettings`.
            check_values: whether NaN and infinite values are looked for.
            keep: whether it is to be kept.

        Returns:
            ``bound_tensors``, ``expected_tensors`` and ``fingerprint``; or ``problem`` and ``lists`` of names.

        Raises:
            EngineLostError: the engine is not up, or ends.
        """
        fields = {"version": version, "kind": kind, "path": path, "lora": lora}
        fields |= {"check_values": check_values, "keep": keep}
        return await self.request("policy_load", fields, POLICY_TIMEOUT_SECONDS)

    def unload_policy(self, version: int) -> None:
        """Forget a version, once nothing that was submitted before uses it."""
        self.send("policy_unload", {"version": version})

    def activate_policy(self, version: int, mode: str) -> Awaitable[dict[str, Any]]:
        """Make a loaded version current: at once for what is submitted after this call.

        Args:
            version: the version.
            mode: what becomes of running rollouts: new_rollouts, next_step or abort.

        Returns:
            To be awaited: ``fingerprint`` of the live weights, 0 while running rollouts keep them from their place.

        Raises:
            EngineLostError: the engine is not up.
        """
        answer = self._send_request("policy_activate", {"version": version, "mode": mode}, POLICY_TIMEOUT_SECONDS)
        for stream in self._streams.values():
            if mode == "abort" and stream.policy_version != version:
                stream._frames.put_nowait(PolicyActivatedError(f"policy version {version} was activated"))
            elif mode == "next_step" and stream.spec.may_switch_to(version):
                stream.policy_version = version
        return answer

    async def policy_fingerprint(self, version: int) -> int:
        """Of the live weights of a loaded version; 0 if they are full weights that are not in place.

        Raises:
            EngineLostError: the engine is not up, or ends.
        """
        answer = await self.request("policy_fingerprint", {"version": version}, POLICY_TIMEOUT_SECONDS)
        return answer["fingerprint"]

    # -- the process

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollout_service.engine.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C at a terminal reaches the frontend alone
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        channel = AsyncChannel(ours)
        settings = self.settings
        configure = {
            "model": settings.model,
            "revision": settings.revision,
            "dtype": settings.dtype,
            "device": settings.device,
            "threads": settings.threads,
            "scratch": settings.scratch,
            "conductor": {
                "max_batch_rows": settings.max_batch_rows,
                "max_running_samples": settings.max_running_samples,
                "batch_invariant": settings.batch_invariant,
                "prompt_cache_bytes": settings.prompt_cache_bytes,
            },
        }
        try:
            channel.send("configure", configure)
            frame = await asyncio.wait_for(channel.receive(), timeout=settings.start_timeout_seconds)
        except (OSError, TimeoutError) as error:
            await self._discard(channel)
            raise ModelError(f"{settings.model}: the engine did not start: {type(error).__name__}") from error
        except BaseException:
            await self._discard(channel)
            raise
        if frame is None or frame.kind != "ready":
            await self._discard(channel)
            message = frame.fields["message"] if frame else "the engine process ended while loading it (out of memory?)"
            raise ModelError(message if frame else f"{settings.model}: {message}")
        self._facts = PipelineFacts(**frame.fields)
        self._channel = channel
        self._on_change(True)

    async def _discard(self, channel: AsyncChannel) -> None:
        await channel.close()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def _supervise(self) -> None:
        while True:
            assert self._channel is not None
            assert self._process is not None
            try:
                await self._pump(self._channel)
            except Exception:
                log.exception("engine.bad_frame")  # as if it had ended: it is killed and started again
            channel, self._channel = self._channel, None
            self._on_change(False)
            self._abandon_streams()
            await self._discard(channel)
            if self._stopping:
                return
            log.error("engine.ended", returncode=self._process.returncode)
            await self._restart()

    async def _restart(self) -> None:
        for attempt in itertools.count():
            await asyncio.sleep(RESTART_BACKOFF_SECONDS[min(attempt, len(RESTART_BACKOFF_SECONDS) - 1)])
            self.restarts += 1
            try:
                await self._spawn()
            except Exception as error:  # no memory or descriptors now, perhaps: try again, for as long as it takes
                log.error("engine.restart_failed", error=str(error))
            else:
                log.info("engine.restarted", restarts=self.restarts)
                return

    async def _pump(self, channel: AsyncChannel) -> None:
        """Hand frames to their streams until the engine is gone."""
        while (frame := await channel.receive()) is not None:
            if frame.kind == "answer":
                future = self._requests.get(frame.fields["request"])
                if future is not None and not future.done():
                    future.set_result(frame.fields)
                continue
            stream = self._streams.get(frame.fields["rollout_id"])
            if stream is None:
                continue
            stream.started |= frame.kind == "started"
            if frame.kind == "finished":
                stream.ended = True
                del self._streams[stream.rollout_id]
            stream._frames.put_nowait(frame)

    def _abandon_streams(self) -> None:
        error = EngineLostError("the engine process ended")
        self.end_streams(error)
        for stream in self._streams.values():
            stream.ended = True
        self._streams.clear()
        for future in list(self._requests.values()):
            if not future.done():
                future.set_exception(error)


async def _answer(future: asyncio.Future[dict[str, Any]], timeout: float) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(future, timeout)
    except TimeoutError as error:
        raise EngineLostError("the engine does not answer") from error
