"""What can go wrong, as a tree under :class:`RolloutError`."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class RolloutError(Exception):
    """Any error of this client. ``reason`` is the protocol's ErrorReason without its prefix, if there is one."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRequestError(RolloutError):
    """The request cannot be run; ``field`` is the path of what is wrong with it."""

    def __init__(self, message: str, reason: str = "INVALID_FIELD", field: str = "") -> None:
        super().__init__(message, reason)
        self.field = field


class OverLimitError(InvalidRequestError):
    """The request is larger than one of the server's limits: split it."""


class QueueFullError(RolloutError):
    """The server has no room; try again after ``retry_after_seconds``."""

    def __init__(self, message: str, reason: str = "QUEUE_FULL", retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, reason)
        self.retry_after_seconds = retry_after_seconds


class PolicyUnavailableError(RolloutError):
    """The policy requirement cannot be met."""


class UnavailableError(RolloutError):
    """The server cannot be reached, is draining, or its engine was restarted: resume from the last complete steps."""


class DeadlineExceededError(RolloutError):
    """The call's timeout passed."""


class CancelledError(RolloutError):
    """The stream was cancelled."""


class AuthenticationError(RolloutError):
    """Missing or bad credentials."""


class IntegrityError(RolloutError):
    """What arrived is not what was promised: sequence, counts, shapes, values or digest."""


class ServerBugError(RolloutError):
    """A status that the protocol does not name (INTERNAL, UNKNOWN, ...): a bug of the server or on the way."""


_BY_CODE: dict[grpc.StatusCode, type[RolloutError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
    grpc.StatusCode.FAILED_PRECONDITION: PolicyUnavailableError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
}


def from_rpc_error(error: grpc.RpcError) -> RolloutError:
    """The typed error of a failed RPC (of a sync or an aio call)."""
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    message = error.details() or code.name  # type: ignore[attr-defined]
    reason, field, retry_after = _details(error)
    kind = OverLimitError if reason == "OVER_LIMIT" else _BY_CODE.get(code, ServerBugError)
    if issubclass(kind, InvalidRequestError):
        return kind(message, reason, field)
    if kind is QueueFullError:
        if not reason:  # gRPC's own: a message over a size limit
            return OverLimitError(message, "OVER_LIMIT")
        return QueueFullError(message, reason, retry_after or 1.0)
    return kind(message, reason)


def _details(error: grpc.RpcError) -> tuple[str, str, float | None]:
    """(reason, field, retry_after_seconds) from the error's google.rpc.Status."""
    reason, field, retry_after = "", "", None
    for key, value in error.trailing_metadata() or ():  # type: ignore[attr-defined]
        if key != _DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            bad_request = error_details_pb2.BadRequest()
            retry_info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad_request):
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry_info):
                retry_after = retry_info.retry_delay.ToTimedelta().total_seconds()
    return reason, field, retry_after
