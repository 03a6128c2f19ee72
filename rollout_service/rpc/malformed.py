"""Requests that are no protobuf message are the caller's fault: INVALID_ARGUMENT, where gRPC itself says UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from .errors import abort, invalid

_MALFORMED = object()


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Answers requests that cannot be decoded."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's deserializer and handler."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(behaviour):
            return handler

        def deserialize(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return _MALFORMED

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if request is _MALFORMED:
                await abort(context, invalid("request", "is no message of this method; check the protocol's version"))
            return await behaviour(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, deserialize, handler.response_serializer)
