import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_KIND_UNSPECIFIED: _ClassVar[PolicyKind]
    POLICY_KIND_FULL: _ClassVar[PolicyKind]
    POLICY_KIND_LORA: _ClassVar[PolicyKind]

class ActivationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_MODE_UNSPECIFIED: _ClassVar[ActivationMode]
    ACTIVATION_MODE_NEW_ROLLOUTS: _ClassVar[ActivationMode]
    ACTIVATION_MODE_NEXT_STEP: _ClassVar[ActivationMode]
    ACTIVATION_MODE_ABORT: _ClassVar[ActivationMode]

class PolicyState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_STATE_UNSPECIFIED: _ClassVar[PolicyState]
    POLICY_STATE_UPLOADING: _ClassVar[PolicyState]
    POLICY_STATE_READY: _ClassVar[PolicyState]
    POLICY_STATE_CURRENT: _ClassVar[PolicyState]
POLICY_KIND_UNSPECIFIED: PolicyKind
POLICY_KIND_FULL: PolicyKind
POLICY_KIND_LORA: PolicyKind
ACTIVATION_MODE_UNSPECIFIED: ActivationMode
ACTIVATION_MODE_NEW_ROLLOUTS: ActivationMode
ACTIVATION_MODE_NEXT_STEP: ActivationMode
ACTIVATION_MODE_ABORT: ActivationMode
POLICY_STATE_UNSPECIFIED: PolicyState
POLICY_STATE_UPLOADING: PolicyState
POLICY_STATE_READY: PolicyState
POLICY_STATE_CURRENT: PolicyState

class UploadPolicyRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PolicyHeader
    chunk: PolicyChunk
    def __init__(self, header: _Optional[_Union[PolicyHeader, _Mapping]] = ..., chunk: _Optional[_Union[PolicyChunk, _Mapping]] = ...) -> None: ...

class PolicyHeader(_message.Message):
    __slots__ = ("version", "kind", "size_bytes", "sha256", "lora_rank", "lora_alpha", "rank_pattern", "alpha_pattern")
    class RankPatternEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AlphaPatternEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    LORA_ALPHA_FIELD_NUMBER: _ClassVar[int]
    RANK_PATTERN_FIELD_NUMBER: _ClassVar[int]
    ALPHA_PATTERN_FIELD_NUMBER: _ClassVar[int]
    version: int
    kind: PolicyKind
    size_bytes: int
    sha256: bytes
    lora_rank: int
    lora_alpha: float
    rank_pattern: _containers.ScalarMap[str, int]
    alpha_pattern: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[int] = ..., kind: _Optional[_Union[PolicyKind, str]] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., lora_rank: _Optional[int] = ..., lora_alpha: _Optional[float] = ..., rank_pattern: _Optional[_Mapping[str, int]] = ..., alpha_pattern: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PolicyChunk(_message.Message):
    __slots__ = ("offset", "crc32c", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    crc32c: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: PolicyVersion
    def __init__(self, policy: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class ActivatePolicyRequest(_message.Message):
    __slots__ = ("version", "mode", "expected_current_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CURRENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    mode: ActivationMode
    expected_current_version: int
    def __init__(self, version: _Optional[int] = ..., mode: _Optional[_Union[ActivationMode, str]] = ..., expected_current_version: _Optional[int] = ...) -> None: ...

class ActivatePolicyResponse(_message.Message):
    __slots__ = ("previous_version", "policy")
    PREVIOUS_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    previous_version: int
    policy: PolicyVersion
    def __init__(self, previous_version: _Optional[int] = ..., policy: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: PolicyVersion
    def __init__(self, policy: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class ListPoliciesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPoliciesResponse(_message.Message):
    __slots__ = ("policies", "next_page_token")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[PolicyVersion]
    next_page_token: str
    def __init__(self, policies: _Optional[_Iterable[_Union[PolicyVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeletePolicyRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class DeletePolicyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("version", "kind", "state", "size_bytes", "committed_bytes", "sha256", "bound_tensors", "expected_tensors", "fingerprint", "create_time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BOUND_TENSORS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    version: int
    kind: PolicyKind
    state: PolicyState
    size_bytes: int
    committed_bytes: int
    sha256: bytes
    bound_tensors: int
    expected_tensors: int
    fingerprint: int
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[int] = ..., kind: _Optional[_Union[PolicyKind, str]] = ..., state: _Optional[_Union[PolicyState, str]] = ..., size_bytes: _Optional[int] = ..., committed_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., bound_tensors: _Optional[int] = ..., expected_tensors: _Optional[int] = ..., fingerprint: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
