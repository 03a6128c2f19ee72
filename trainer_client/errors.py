"""What can go wrong, as a tree under :class:`RolloutError`."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class RolloutError(Exception):
    """Any error of this client. ``reason`` is the protocol's ErrorReason without its prefix, if there is one.

    ``metadata`` is what else the server says, by name; of a policy whose tensors do not bind the first names at fault,
    one per line, under ``missing``, ``unknown``, ``misshapen`` and ``non_finite``, and how many under
    ``missing_count`` and so on.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata: dict[str, str] = {}


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
    """The policy requirement cannot be met, or the policy version is unknown."""


class PolicyConflictError(RolloutError):
    """Another upload, activation or use of policy versions stands against it: the version exists with other content or
    was deleted, another one is current than was expected, or a version to delete is current or in use.
    """


class PolicyBusyError(PolicyConflictError):
    """Somebody else is doing it already, such as uploading the same version: try again later."""


class PolicyActivatedError(RolloutError):
    """The rollout was ended by an activation in the mode ``abort``: start it again on the new version."""


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
    grpc.StatusCode.ALREADY_EXISTS: PolicyConflictError,
    grpc.StatusCode.ABORTED: PolicyBusyError,
    grpc.StatusCode.DATA_LOSS: IntegrityError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
}
#: Reasons that say more than the code.
_BY_REASON: dict[tuple[grpc.StatusCode, str], type[RolloutError]] = {
    (grpc.StatusCode.FAILED_PRECONDITION, "POLICY_CONFLICT"): PolicyConflictError,
    (grpc.StatusCode.ABORTED, "POLICY_ACTIVATED"): PolicyActivatedError,
}


def from_rpc_error(error: grpc.RpcError) -> RolloutError:
    """The typed error of a failed RPC (of a sync or an aio call)."""
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    reason, field, retry_after, metadata = _details(error)
    typed = _typed(code, error.details() or code.name, reason, field, retry_after)  # type: ignore[attr-defined]
    typed.metadata = metadata
    return typed


def _typed(code: grpc.StatusCode, message: str, reason: str, field: str, retry_after: float | None) -> RolloutError:
    kind = _BY_REASON.get((code, reason)) or _BY_CODE.get(code, ServerBugError)
    if reason == "OVER_LIMIT":
        kind = OverLimitError
    if issubclass(kind, InvalidRequestError):
        return kind(message, reason, field)
    if kind is QueueFullError:
        if not reason:  # gRPC's own: a message over a size limit
            return OverLimitError(message, "OVER_LIMIT")
        return QueueFullError(message, reason, retry_after or 1.0)
    return kind(message, reason)


def _details(error: grpc.RpcError) -> tuple[str, str, float | None, dict[str, str]]:
    """(reason, field, retry_after_seconds, metadata) from the error's google.rpc.Status."""
    reason, field, retry_after = "", "", None
    metadata: dict[str, str] = {}
    for key, value in error.trailing_metadata() or ():  # type: ignore[attr-defined]
        if key != _DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            bad_request = error_details_pb2.BadRequest()
            retry_info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(bad_request):
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry_info):
                retry_after = retry_info.retry_delay.ToTimedelta().total_seconds()
    return reason, field, retry_after, metadata
