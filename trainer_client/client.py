"""The clients. Both are thin: requests, decoding and verification are shared, and do no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import rollout_pb2_grpc

from .errors import CancelledError, RolloutError, UnavailableError, from_rpc_error
from .events import Event, EventDecoder
from .progress import RolloutProgressBar
from .request import Prompt, build_request
from .trajectory import Trajectory, TrajectoryBuilder


def _stream_error(error: grpc.RpcError, cancelled: bool) -> RolloutError:
    """The typed error of a stream. CANCELLED that this end did not ask for is a server that has gone away."""
    typed = from_rpc_error(error)
    if isinstance(typed, CancelledError) and not cancelled:
        return UnavailableError("the server ended the stream, perhaps because it shuts down")
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
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=list(options))
        else:
            self._channel = grpc.secure_channel(target, credentials, options=list(options))
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

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

    @staticmethod
    def _unary(method: Any, request: Any, timeout: float) -> Any:
        try:
            return method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

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
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=list(options))
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=list(options))
        self._stub: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)

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

    @staticmethod
    async def _unary(method: Any, request: Any, timeout: float) -> Any:
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def close(self) -> None:
        """Close the connection; open streams end."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
