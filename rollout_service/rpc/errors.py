"""Errors as google.rpc.Status with ErrorInfo, and BadRequest field paths where a field is at fault."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "diffusion-rollout"

#: A status travels in HTTP/2 trailers, of which 8 KiB are safe. What a request holds is cut to this many characters.
_LONGEST_TEXT = 500
_LONGEST_FIELD = 120


class ServiceError(Exception):
    """An error as the client will see it.

    Args:
        code: the gRPC status code.
        reason: ErrorInfo reason, as in the protocol's ErrorReason.
        message: for a person.
        field: path of the request's field at fault.
        metadata: ErrorInfo metadata.
        retry_after_seconds: when to try again (RetryInfo).
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str | None = None,
        metadata: dict[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(shorten(message, _LONGEST_TEXT))
        self.code, self.reason = code, reason
        self.field = field and shorten(field, _LONGEST_FIELD)
        self.metadata, self.retry_after_seconds = metadata or {}, retry_after_seconds

    def to_status(self) -> status_pb2.Status:
        """As a google.rpc.Status."""
        details: list[Any] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)]
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=str(self))
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after_seconds is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(self.retry_after_seconds * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        return status_pb2.Status(code=self.code.value[0], message=str(self), details=packed)


def shorten(text: str, length: int) -> str:
    """``text``, its middle cut out if it is longer than ``length`` characters."""
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def invalid(field: str, problem: str) -> ServiceError:
    """A field that is wrong; ``problem`` says what to pass instead."""
    message = f"{shorten(field, _LONGEST_FIELD)}: {problem}"
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, field=field)


def over_limit(field: str, value: int, limit_name: str, limit: int) -> ServiceError:
    """A field beyond one of the server's limits."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "OVER_LIMIT",
        f"{field}: {value} is over this server's {limit_name} of {limit}; send less, or split the rollout",
        field=field,
        metadata={"limit": str(limit), "limit_name": limit_name, "value": str(value)},
    )


def draining() -> ServiceError:
    """The server stops."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "DRAINING", "this server is shutting down; resume from the last steps on another"
    )


def engine_restarted(message: str) -> ServiceError:
    """The engine is not up."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTED", message, retry_after_seconds=1.0)


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> NoReturn:
    """End the RPC with an error."""
    details = (("grpc-status-details-bin", error.to_status().SerializeToString()),)
    await context.abort(error.code, str(error), trailing_metadata=details)
    raise AssertionError("abort does not return")
