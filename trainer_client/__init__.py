"""What a trainer imports: clients, policies, trajectories, replay and typed errors."""

from .client import AsyncRolloutClient, AsyncRolloutStream, RolloutClient, RolloutStream
from .errors import (
    AuthenticationError,
    CancelledError,
    DeadlineExceededError,
    IntegrityError,
    InvalidRequestError,
    OverLimitError,
    PolicyActivatedError,
    PolicyBusyError,
    PolicyConflictError,
    PolicyUnavailableError,
    QueueFullError,
    RolloutError,
    ServerBugError,
    UnavailableError,
)
from .events import Accepted, ConditioningEntry, ConditioningReceived, Event, Finished, SampleFinished, Started, Step
from .policy import LoraSettings, PolicySource, local_fingerprint
from .replay import ReplayedStep, replay
from .request import Prompt, Sample, StartState, build_request
from .trajectory import Trajectory

__all__ = [
    "Accepted",
    "AsyncRolloutClient",
    "AsyncRolloutStream",
    "AuthenticationError",
    "CancelledError",
    "ConditioningEntry",
    "ConditioningReceived",
    "DeadlineExceededError",
    "Event",
    "Finished",
    "IntegrityError",
    "InvalidRequestError",
    "LoraSettings",
    "OverLimitError",
    "PolicyActivatedError",
    "PolicyBusyError",
    "PolicyConflictError",
    "PolicySource",
    "PolicyUnavailableError",
    "Prompt",
    "QueueFullError",
    "ReplayedStep",
    "RolloutClient",
    "RolloutError",
    "RolloutStream",
    "Sample",
    "SampleFinished",
    "ServerBugError",
    "StartState",
    "Started",
    "Step",
    "Trajectory",
    "UnavailableError",
    "build_request",
    "local_fingerprint",
    "replay",
]
