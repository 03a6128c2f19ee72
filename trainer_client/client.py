"""The clients. Both are thin: requests, decoding and verification are shared, and do no I/O."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
from diffusion_rollout.v1 import policy_pb2, policy_pb2_grpc, rollout_pb2_grpc
from diffusion_rollout.v1 import rollout_pb2 as pb

from .errors import CancelledError, RolloutError, UnavailableError, from_rpc_error
from .events import Event, EventDecoder
from .policy import (
    DEFAULT_CHUNK_BYTES,
    Action,
    Lora,
    Pause,
    PolicyProgressBar,
    PolicySource,
    Steps,
    Upload,
    UploadMessages,
    activation,
    list_steps,
    of_version,
    prepare_push,
)
from .progress import RolloutProgressBar
from .request import Prompt, build_request
from .trajectory import Trajectory, TrajectoryBuilder

#: An activation waits until the version is loaded, which reads its file.
_ACTIVATION_TIMEOUT_SECONDS = 300.0


def _stream_error(error: grpc.RpcError, cancelled: bool) -> RolloutError:
    """The typed error of a call. CANCELLED that this end did not ask for is a server that has gone away."""
    typed = from_rpc_error(error)
    if isinstance(typed, CancelledError) and not cancelled:
        return UnavailableError("the server ended the call, perhaps because it shuts down")
    return typed


class RolloutStream:
    """The events of one rollout: iterate over them as they come, or :meth:`collect` them.

    Leaving the stream (as a context manager), or dropping it, cancels what is left of the rollout.
    """

    def __init__(self, request: pb.GenerateRolloutRequest, call: Any) -> None:
        self.request = request
        self._call = call
        self._decoder = EventDecoder(request)
        self._cancelled = False

    def __iter__(self) -> Iterator[Event]:
        """Events in order.

        Raises:
            RolloutError: the typed error of whatever went wrong; the rollout is cancelled.
        """
        try:
            for response in self._call:
                yield from self._decoder.feed(response)
            self._decoder.end()
        except grpc.RpcError as error:
            raise _stream_error(error, self._cancelled) from error
        finally:
            self.cancel()

    def collect(self, progress: bool = False) -> Trajectory:
        """Read to the end.

        Args:
            progress: show a progress bar on standard error.

        Raises:
            RolloutError: as iterating; failed samples do not raise, see ``Trajectory.errors``.
        """
        builder = TrajectoryBuilder(self.request)
        with RolloutProgressBar(progress) as bar:
            for event in self:
                builder.add(event)
                bar.update(event)
        return builder.build()

    def cancel(self) -> None:
        """Stop the rollout at its next step; nothing if it has ended."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()


class AsyncRolloutStream:
    """As :class:`RolloutStream`, for asyncio."""

    def __init__(self, request: pb.GenerateRolloutRequest, call: Any) -> None:
        self.request = request
        self._call = call
        self._decoder = EventDecoder(request)
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events in order; see :meth:`RolloutStream.__iter__`."""
        try:
            async for response in self._call:
                for event in self._decoder.feed(response):
                    yield event
            self._decoder.end()
        except grpc.RpcError as error:
            raise _stream_error(error, self._cancelled) from error
        except asyncio.CancelledError:
            # grpc.aio raises this also where it was this stream that was cancelled, and not the task that reads it.
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):
                raise CancelledError("the stream was cancelled") from None
            raise
        finally:
            self.cancel()

    async def collect(self, progress: bool = False) -> Trajectory:
        """Read to the end; see :meth:`RolloutStream.collect`."""
        builder = TrajectoryBuilder(self.request)
        with RolloutProgressBar(progress) as bar:
            async for event in self:
                builder.add(event)
                bar.update(event)
        return builder.build()

    def cancel(self) -> None:
        """Stop the rollout at its next step; nothing if it has ended."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncRolloutStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()


def _channel(
    api: Any, target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> Any:
    """A channel of ``grpc`` or ``grpc.aio``."""
    if credentials is None:
        return api.insecure_channel(target, options=list(options))
    return api.secure_channel(target, credentials, options=list(options))


class _UploadCall:
    """An UploadPolicy under way in gRPC's threads.

    Args:
        stub: of a sync channel.
        upload: what to send.
        on_end: called in any thread when it has ended.
    """

    def __init__(self, stub: Any, upload: Upload, on_end: Callable[[], None] | None = None) -> None:
        self._messages = UploadMessages(upload)
        self._call = stub.UploadPolicy.future(iter(self._messages), timeout=upload.timeout)
        if on_end is not None:
            self._call.add_done_callback(lambda _: on_end())

    def result(self) -> policy_pb2.UploadPolicyResponse:
        """The response; waits for it.

        Raises:
            RolloutError: the typed error of the call.
            OSError: the file could not be read.
        """
        try:
            return self._call.result()
        except grpc.RpcError as error:
            if self._messages.error is not None:
                raise self._messages.error from None
            raise _stream_error(error, False) from error

    def cancel(self) -> None:
        """Stop it; nothing if it has ended."""
        self._call.cancel()


class RolloutClient:
    """A client of one server. Use as a context manager, or :meth:`close` it.

    Example::

        with RolloutClient("localhost:50051") as client:
            trajectory = client.generate("red circle top left", samples_per_prompt=4).collect()
        trajectory.log_probs  # [4, T]

    Args:
        target: host:port, or any gRPC target.
        credentials: TLS credentials; None connects in plaintext.
        options: gRPC channel options.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._channel = _channel(grpc, target, credentials, options)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._policies: Any = policy_pb2_grpc.PolicyServiceStub(self._channel)

    def generate(
        self, prompts: str | Sequence[str | Prompt], *, timeout: float | None = None, **settings: Any
    ) -> RolloutStream:
        """Start a rollout.

        Args:
            prompts: texts, or :class:`Prompt` objects.
            timeout: seconds for the whole rollout.
            settings: every keyword of :func:`trainer_client.request.build_request`.

        Raises:
            InvalidRequestError: a value that a request cannot hold; the server's own checks raise when iterating.
        """
        return self.send(build_request(prompts, **settings), timeout=timeout)

    def send(self, request: pb.GenerateRolloutRequest, *, timeout: float | None = None) -> RolloutStream:
        """Start a rollout from a request message."""
        return RolloutStream(request, self._stub.GenerateRollout(request, timeout=timeout))

    def server_info(self, timeout: float = 10) -> pb.GetServerInfoResponse:
        """The model, its defaults and the server's limits."""
        return self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)

    def status(self, timeout: float = 10) -> pb.GetStatusResponse:
        """What the server is doing now."""
        return self._unary(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    def push_policy(
        self,
        source: PolicySource,
        version: int,
        *,
        lora: Lora | None = None,
        activate: bool = True,
        mode: str = "new_rollouts",
        expected_current_version: int | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        progress: bool = False,
        timeout: float = 600.0,
        attempts: int = 5,
    ) -> policy_pb2.PolicyVersion:
        """Upload weights as a policy version and, unless told otherwise, make it current.

        A broken upload continues where the server's bytes end, in this call or in a later one with the same content.
        Pushing again what is there already changes nothing.

        Args:
            source: a module: the LoRA adapter that PEFT put on it, or all its weights if it has none; or a state dict;
                or the path of a .safetensors file, or of a directory that PEFT saved an adapter to.
            version: greater than every existing one.
            lora: :class:`LoraSettings` or ``peft.LoraConfig`` of a state dict or file that is a LoRA. None: full
                weights, or what the module or the directory says.
            activate: whether to make it current.
            mode: what happens to rollouts in flight: ``new_rollouts`` (they finish on their version), ``next_step``
                (they switch) or ``abort`` (they end).
            expected_current_version: activate only if this is the current version, or ``version`` is already.
            chunk_bytes: bytes of a message; the server has an upper limit.
            progress: show a progress bar on standard error.
            timeout: seconds for everything.
            attempts: tries, with pauses from 0.2 s to 5 s, while the server is unavailable or busy with this version.

        Returns:
            The version as stored (and activated): sha256, fingerprint, state, tensors bound.

        Raises:
            ValueError, TypeError: a source that cannot be sent.
            OSError: a file that cannot be read.
            InvalidRequestError: tensors do not bind (names in ``metadata``), or a bad value.
            PolicyConflictError: the version exists with other content, or another one is current than was expected.
            IntegrityError: the bytes that arrived are not those that were sent.
            RolloutError: any other typed error; of the last try.
        """
        push = prepare_push(
            source,
            version,
            lora=lora,
            activate=activate,
            mode=mode,
            expected_current_version=expected_current_version,
            chunk_bytes=chunk_bytes,
            timeout=timeout,
            attempts=attempts,
        )
        with push.file, PolicyProgressBar(progress, push.file.size_bytes, version) as bar:
            return self._run(push.steps(bar))

    def activate_policy(
        self,
        version: int,
        *,
        mode: str = "new_rollouts",
        expected_current_version: int | None = None,
        timeout: float = _ACTIVATION_TIMEOUT_SECONDS,
    ) -> policy_pb2.PolicyVersion:
        """Make a version current, of :meth:`list_policies`; also an older one.

        Args:
            version: the version.
            mode: as in :meth:`push_policy`.
            expected_current_version: refuse unless this is the current version.
            timeout: seconds.

        Raises:
            PolicyUnavailableError: the version is unknown.
            PolicyConflictError: another one is current than was expected.
        """
        request = activation(version, mode, expected_current_version)
        return self._unary(self._policies.ActivatePolicy, request, timeout).policy

    def get_policy(self, version: int, timeout: float = 10) -> policy_pb2.PolicyVersion:
        """One version, or the state of its upload.

        Raises:
            PolicyUnavailableError: the version is unknown.
        """
        request = of_version(policy_pb2.GetPolicyRequest, version)
        return self._unary(self._policies.GetPolicy, request, timeout).policy

    def list_policies(self, timeout: float = 10) -> list[policy_pb2.PolicyVersion]:
        """All versions, latest first; ``timeout`` is that of each page."""
        return self._run(list_steps(timeout))

    def delete_policy(self, version: int, timeout: float = 10) -> None:
        """Delete a version for good.

        Raises:
            PolicyUnavailableError: the version is unknown.
            PolicyConflictError: it is current, 0, or in use.
        """
        self._unary(self._policies.DeletePolicy, of_version(policy_pb2.DeletePolicyRequest, version), timeout)

    def _run(self, steps: Steps) -> Any:
        """Do what a conversation asks for until it ends; returns its result."""
        result: Any = None
        error: RolloutError | None = None
        while True:
            try:
                action = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            result = error = None
            try:
                result = self._do(action)
            except RolloutError as caught:
                error = caught

    def _do(self, action: Action) -> Any:
        if isinstance(action, Pause):
            return time.sleep(action.seconds)
        if isinstance(action, Upload):
            return self._upload(action)
        return self._unary(getattr(self._policies, action.method), action.request, action.timeout)

    def _upload(self, upload: Upload) -> policy_pb2.UploadPolicyResponse:
        call = _UploadCall(self._policies, upload)
        try:
            return call.result()
        finally:
            call.cancel()

    @staticmethod
    def _unary(method: Any, request: Any, timeout: float) -> Any:
        try:
            return method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise _stream_error(error, False) from error

    def close(self) -> None:
        """Close the connection; open streams end."""
        self._channel.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncRolloutClient:
    """As :class:`RolloutClient`, for asyncio; create it inside the event loop."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._target, self._credentials, self._options = target, credentials, options
        self._channel = _channel(grpc.aio, target, credentials, options)
        self._stub: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._policies: Any = policy_pb2_grpc.PolicyServiceStub(self._channel)

    def generate(
        self, prompts: str | Sequence[str | Prompt], *, timeout: float | None = None, **settings: Any
    ) -> AsyncRolloutStream:
        """Start a rollout; see :meth:`RolloutClient.generate`."""
        return self.send(build_request(prompts, **settings), timeout=timeout)

    def send(self, request: pb.GenerateRolloutRequest, *, timeout: float | None = None) -> AsyncRolloutStream:
        """Start a rollout from a request message."""
        return AsyncRolloutStream(request, self._stub.GenerateRollout(request, timeout=timeout))

    async def server_info(self, timeout: float = 10) -> pb.GetServerInfoResponse:
        """The model, its defaults and the server's limits."""
        return await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)

    async def status(self, timeout: float = 10) -> pb.GetStatusResponse:
        """What the server is doing now."""
        return await self._unary(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    async def push_policy(
        self,
        source: PolicySource,
        version: int,
        *,
        lora: Lora | None = None,
        activate: bool = True,
        mode: str = "new_rollouts",
        expected_current_version: int | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        progress: bool = False,
        timeout: float = 600.0,
        attempts: int = 5,
    ) -> policy_pb2.PolicyVersion:
        """Upload weights and make them current; see :meth:`RolloutClient.push_policy`.

        Tensors are copied and files are read in other threads: leave the weights alone until this returns.
        """
        push = await asyncio.to_thread(
            prepare_push,
            source,
            version,
            lora=lora,
            activate=activate,
            mode=mode,
            expected_current_version=expected_current_version,
            chunk_bytes=chunk_bytes,
            timeout=timeout,
            attempts=attempts,
        )
        with push.file, PolicyProgressBar(progress, push.file.size_bytes, version) as bar:
            return await self._run(push.steps(bar))

    async def activate_policy(
        self,
        version: int,
        *,
        mode: str = "new_rollouts",
        expected_current_version: int | None = None,
        timeout: float = _ACTIVATION_TIMEOUT_SECONDS,
    ) -> policy_pb2.PolicyVersion:
        """Make a version current; see :meth:`RolloutClient.activate_policy`."""
        request = activation(version, mode, expected_current_version)
        return (await self._unary(self._policies.ActivatePolicy, request, timeout)).policy

    async def get_policy(self, version: int, timeout: float = 10) -> policy_pb2.PolicyVersion:
        """One version, or the state of its upload; see :meth:`RolloutClient.get_policy`."""
        request = of_version(policy_pb2.GetPolicyRequest, version)
        return (await self._unary(self._policies.GetPolicy, request, timeout)).policy

    async def list_policies(self, timeout: float = 10) -> list[policy_pb2.PolicyVersion]:
        """All versions, latest first; ``timeout`` is that of each page."""
        return await self._run(list_steps(timeout))

    async def delete_policy(self, version: int, timeout: float = 10) -> None:
        """Delete a version for good; see :meth:`RolloutClient.delete_policy`."""
        await self._unary(self._policies.DeletePolicy, of_version(policy_pb2.DeletePolicyRequest, version), timeout)

    async def _run(self, steps: Steps) -> Any:
        """As :meth:`RolloutClient._run`."""
        result: Any = None
        error: RolloutError | None = None
        while True:
            try:
                action = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            result = error = None
            try:
                result = await self._do(action)
            except RolloutError as caught:
                error = caught

    async def _do(self, action: Action) -> Any:
        if isinstance(action, Pause):
            return await asyncio.sleep(action.seconds)
        if isinstance(action, Upload):
            return await self._upload(action)
        return await self._unary(getattr(self._policies, action.method), action.request, action.timeout)

    async def _upload(self, upload: Upload) -> policy_pb2.UploadPolicyResponse:
        # Not with grpc.aio: if the server ends a call while it is written to, that loses the status (grpc issue 36066).
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(ended.set)

        with _channel(grpc, self._target, self._credentials, self._options) as channel:
            call = _UploadCall(policy_pb2_grpc.PolicyServiceStub(channel), upload, end)
            try:
                await ended.wait()
                return call.result()
            finally:
                call.cancel()

    @staticmethod
    async def _unary(method: Any, request: Any, timeout: float) -> Any:
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise _stream_error(error, False) from error

    async def close(self) -> None:
        """Close the connection; open streams end."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
