import datetime

from diffusion_rollout.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dynamics(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DYNAMICS_UNSPECIFIED: _ClassVar[Dynamics]
    DYNAMICS_ODE: _ClassVar[Dynamics]
    DYNAMICS_SDE: _ClassVar[Dynamics]
    DYNAMICS_DANCE: _ClassVar[Dynamics]
    DYNAMICS_CPS: _ClassVar[Dynamics]

class LogProbKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_PROB_KIND_UNSPECIFIED: _ClassVar[LogProbKind]
    LOG_PROB_KIND_GAUSSIAN: _ClassVar[LogProbKind]
    LOG_PROB_KIND_SQUARED_ERROR: _ClassVar[LogProbKind]

class NoiseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOISE_MODE_UNSPECIFIED: _ClassVar[NoiseMode]
    NOISE_MODE_KEYED: _ClassVar[NoiseMode]
    NOISE_MODE_SEQUENTIAL: _ClassVar[NoiseMode]

class LatentsSelection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LATENTS_SELECTION_UNSPECIFIED: _ClassVar[LatentsSelection]
    LATENTS_SELECTION_ALL: _ClassVar[LatentsSelection]
    LATENTS_SELECTION_STOCHASTIC: _ClassVar[LatentsSelection]
    LATENTS_SELECTION_FINAL: _ClassVar[LatentsSelection]
    LATENTS_SELECTION_NONE: _ClassVar[LatentsSelection]

class MediaFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_FORMAT_UNSPECIFIED: _ClassVar[MediaFormat]
    MEDIA_FORMAT_NONE: _ClassVar[MediaFormat]
    MEDIA_FORMAT_RAW: _ClassVar[MediaFormat]
    MEDIA_FORMAT_PNG: _ClassVar[MediaFormat]

class TensorRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_ROLE_UNSPECIFIED: _ClassVar[TensorRole]
    TENSOR_ROLE_LATENTS: _ClassVar[TensorRole]
    TENSOR_ROLE_NOISE: _ClassVar[TensorRole]
    TENSOR_ROLE_MEAN: _ClassVar[TensorRole]
    TENSOR_ROLE_VELOCITY: _ClassVar[TensorRole]

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_FIELD: _ClassVar[ErrorReason]
    ERROR_REASON_OVER_LIMIT: _ClassVar[ErrorReason]
    ERROR_REASON_QUEUE_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_POLICY_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_ENGINE_RESTARTED: _ClassVar[ErrorReason]
    ERROR_REASON_NON_FINITE: _ClassVar[ErrorReason]
    ERROR_REASON_PIPELINE_ERROR: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_CREDENTIALS: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKSUM_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_POLICY_ACTIVATED: _ClassVar[ErrorReason]
    ERROR_REASON_POLICY_CONFLICT: _ClassVar[ErrorReason]
DYNAMICS_UNSPECIFIED: Dynamics
DYNAMICS_ODE: Dynamics
DYNAMICS_SDE: Dynamics
DYNAMICS_DANCE: Dynamics
DYNAMICS_CPS: Dynamics
LOG_PROB_KIND_UNSPECIFIED: LogProbKind
LOG_PROB_KIND_GAUSSIAN: LogProbKind
LOG_PROB_KIND_SQUARED_ERROR: LogProbKind
NOISE_MODE_UNSPECIFIED: NoiseMode
NOISE_MODE_KEYED: NoiseMode
NOISE_MODE_SEQUENTIAL: NoiseMode
LATENTS_SELECTION_UNSPECIFIED: LatentsSelection
LATENTS_SELECTION_ALL: LatentsSelection
LATENTS_SELECTION_STOCHASTIC: LatentsSelection
LATENTS_SELECTION_FINAL: LatentsSelection
LATENTS_SELECTION_NONE: LatentsSelection
MEDIA_FORMAT_UNSPECIFIED: MediaFormat
MEDIA_FORMAT_NONE: MediaFormat
MEDIA_FORMAT_RAW: MediaFormat
MEDIA_FORMAT_PNG: MediaFormat
TENSOR_ROLE_UNSPECIFIED: TensorRole
TENSOR_ROLE_LATENTS: TensorRole
TENSOR_ROLE_NOISE: TensorRole
TENSOR_ROLE_MEAN: TensorRole
TENSOR_ROLE_VELOCITY: TensorRole
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_FIELD: ErrorReason
ERROR_REASON_OVER_LIMIT: ErrorReason
ERROR_REASON_QUEUE_FULL: ErrorReason
ERROR_REASON_POLICY_UNAVAILABLE: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_ENGINE_RESTARTED: ErrorReason
ERROR_REASON_NON_FINITE: ErrorReason
ERROR_REASON_PIPELINE_ERROR: ErrorReason
ERROR_REASON_BAD_CREDENTIALS: ErrorReason
ERROR_REASON_CHECKSUM_MISMATCH: ErrorReason
ERROR_REASON_POLICY_ACTIVATED: ErrorReason
ERROR_REASON_POLICY_CONFLICT: ErrorReason

class GenerateRolloutRequest(_message.Message):
    __slots__ = ("prompts", "sampling", "pipeline", "output", "policy")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptRequest]
    sampling: SamplingSettings
    pipeline: PipelineSettings
    output: OutputSettings
    policy: PolicyRequirement
    def __init__(self, prompts: _Optional[_Iterable[_Union[PromptRequest, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingSettings, _Mapping]] = ..., pipeline: _Optional[_Union[PipelineSettings, _Mapping]] = ..., output: _Optional[_Union[OutputSettings, _Mapping]] = ..., policy: _Optional[_Union[PolicyRequirement, _Mapping]] = ...) -> None: ...

class PromptRequest(_message.Message):
    __slots__ = ("prompt", "negative_prompt", "samples", "seed_range")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEED_RANGE_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    negative_prompt: str
    samples: _containers.RepeatedCompositeFieldContainer[SampleRequest]
    seed_range: SeedRange
    def __init__(self, prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SampleRequest, _Mapping]]] = ..., seed_range: _Optional[_Union[SeedRange, _Mapping]] = ...) -> None: ...

class SeedRange(_message.Message):
    __slots__ = ("seed", "count")
    SEED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    seed: int
    count: int
    def __init__(self, seed: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("seed", "initial_noise_seed", "start_state")
    SEED_FIELD_NUMBER: _ClassVar[int]
    INITIAL_NOISE_SEED_FIELD_NUMBER: _ClassVar[int]
    START_STATE_FIELD_NUMBER: _ClassVar[int]
    seed: int
    initial_noise_seed: int
    start_state: StartState
    def __init__(self, seed: _Optional[int] = ..., initial_noise_seed: _Optional[int] = ..., start_state: _Optional[_Union[StartState, _Mapping]] = ...) -> None: ...

class StartState(_message.Message):
    __slots__ = ("step_index", "latents")
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    LATENTS_FIELD_NUMBER: _ClassVar[int]
    step_index: int
    latents: _tensor_pb2.Tensor
    def __init__(self, step_index: _Optional[int] = ..., latents: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SamplingSettings(_message.Message):
    __slots__ = ("num_steps", "sigmas", "dynamics", "noise_level", "stochastic_step_indices", "log_prob_kind", "noise_mode")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SIGMAS_FIELD_NUMBER: _ClassVar[int]
    DYNAMICS_FIELD_NUMBER: _ClassVar[int]
    NOISE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    STOCHASTIC_STEP_INDICES_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_KIND_FIELD_NUMBER: _ClassVar[int]
    NOISE_MODE_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    sigmas: _containers.RepeatedScalarFieldContainer[float]
    dynamics: Dynamics
    noise_level: float
    stochastic_step_indices: StepIndices
    log_prob_kind: LogProbKind
    noise_mode: NoiseMode
    def __init__(self, num_steps: _Optional[int] = ..., sigmas: _Optional[_Iterable[float]] = ..., dynamics: _Optional[_Union[Dynamics, str]] = ..., noise_level: _Optional[float] = ..., stochastic_step_indices: _Optional[_Union[StepIndices, _Mapping]] = ..., log_prob_kind: _Optional[_Union[LogProbKind, str]] = ..., noise_mode: _Optional[_Union[NoiseMode, str]] = ...) -> None: ...

class StepIndices(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class PipelineSettings(_message.Message):
    __slots__ = ("height", "width", "num_frames", "guidance_scale", "arguments")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ArgumentValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ArgumentValue, _Mapping]] = ...) -> None: ...
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    num_frames: int
    guidance_scale: float
    arguments: _containers.MessageMap[str, ArgumentValue]
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., num_frames: _Optional[int] = ..., guidance_scale: _Optional[float] = ..., arguments: _Optional[_Mapping[str, ArgumentValue]] = ...) -> None: ...

class ArgumentValue(_message.Message):
    __slots__ = ("bool_value", "int_value", "double_value", "string_value")
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    bool_value: bool
    int_value: int
    double_value: float
    string_value: str
    def __init__(self, bool_value: _Optional[bool] = ..., int_value: _Optional[int] = ..., double_value: _Optional[float] = ..., string_value: _Optional[str] = ...) -> None: ...

class OutputSettings(_message.Message):
    __slots__ = ("latents_selection", "latents_indices", "latents_dtype", "media", "conditioning", "noise", "mean", "velocity", "max_event_bytes")
    LATENTS_SELECTION_FIELD_NUMBER: _ClassVar[int]
    LATENTS_INDICES_FIELD_NUMBER: _ClassVar[int]
    LATENTS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    CONDITIONING_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    VELOCITY_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    latents_selection: LatentsSelection
    latents_indices: StepIndices
    latents_dtype: _tensor_pb2.DataType
    media: MediaFormat
    conditioning: bool
    noise: bool
    mean: bool
    velocity: bool
    max_event_bytes: int
    def __init__(self, latents_selection: _Optional[_Union[LatentsSelection, str]] = ..., latents_indices: _Optional[_Union[StepIndices, _Mapping]] = ..., latents_dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., media: _Optional[_Union[MediaFormat, str]] = ..., conditioning: _Optional[bool] = ..., noise: _Optional[bool] = ..., mean: _Optional[bool] = ..., velocity: _Optional[bool] = ..., max_event_bytes: _Optional[int] = ...) -> None: ...

class PolicyRequirement(_message.Message):
    __slots__ = ("exactly", "at_least", "max_wait")
    EXACTLY_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    exactly: int
    at_least: int
    max_wait: _duration_pb2.Duration
    def __init__(self, exactly: _Optional[int] = ..., at_least: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerateRolloutResponse(_message.Message):
    __slots__ = ("sequence", "accepted", "started", "conditioning", "step", "sample_finished", "finished")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CONDITIONING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    accepted: RolloutAccepted
    started: RolloutStarted
    conditioning: Conditioning
    step: StepEvent
    sample_finished: SampleFinished
    finished: RolloutFinished
    def __init__(self, sequence: _Optional[int] = ..., accepted: _Optional[_Union[RolloutAccepted, _Mapping]] = ..., started: _Optional[_Union[RolloutStarted, _Mapping]] = ..., conditioning: _Optional[_Union[Conditioning, _Mapping]] = ..., step: _Optional[_Union[StepEvent, _Mapping]] = ..., sample_finished: _Optional[_Union[SampleFinished, _Mapping]] = ..., finished: _Optional[_Union[RolloutFinished, _Mapping]] = ...) -> None: ...

class RolloutAccepted(_message.Message):
    __slots__ = ("rollout_id", "queue_position", "samples", "num_steps", "log_prob_kind", "pipeline", "max_event_bytes", "latents_dtype")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_KIND_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATENTS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    queue_position: int
    samples: _containers.RepeatedCompositeFieldContainer[ResolvedSample]
    num_steps: int
    log_prob_kind: LogProbKind
    pipeline: PipelineSettings
    max_event_bytes: int
    latents_dtype: _tensor_pb2.DataType
    def __init__(self, rollout_id: _Optional[str] = ..., queue_position: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[ResolvedSample, _Mapping]]] = ..., num_steps: _Optional[int] = ..., log_prob_kind: _Optional[_Union[LogProbKind, str]] = ..., pipeline: _Optional[_Union[PipelineSettings, _Mapping]] = ..., max_event_bytes: _Optional[int] = ..., latents_dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ...) -> None: ...

class ResolvedSample(_message.Message):
    __slots__ = ("prompt_index", "seed", "initial_noise_seed", "start_step")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INITIAL_NOISE_SEED_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    seed: int
    initial_noise_seed: int
    start_step: int
    def __init__(self, prompt_index: _Optional[int] = ..., seed: _Optional[int] = ..., initial_noise_seed: _Optional[int] = ..., start_step: _Optional[int] = ...) -> None: ...

class RolloutStarted(_message.Message):
    __slots__ = ("policy_version", "sigmas", "stochastic_step_indices", "latents_indices")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGMAS_FIELD_NUMBER: _ClassVar[int]
    STOCHASTIC_STEP_INDICES_FIELD_NUMBER: _ClassVar[int]
    LATENTS_INDICES_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    sigmas: _containers.RepeatedScalarFieldContainer[float]
    stochastic_step_indices: _containers.RepeatedScalarFieldContainer[int]
    latents_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, policy_version: _Optional[int] = ..., sigmas: _Optional[_Iterable[float]] = ..., stochastic_step_indices: _Optional[_Iterable[int]] = ..., latents_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Conditioning(_message.Message):
    __slots__ = ("prompt_index", "call_index", "component", "rows_per_sample", "name", "batched", "json_value", "last", "tensor")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    CALL_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    JSON_VALUE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    call_index: int
    component: str
    rows_per_sample: int
    name: str
    batched: bool
    json_value: str
    last: bool
    tensor: _tensor_pb2.Tensor
    def __init__(self, prompt_index: _Optional[int] = ..., call_index: _Optional[int] = ..., component: _Optional[str] = ..., rows_per_sample: _Optional[int] = ..., name: _Optional[str] = ..., batched: _Optional[bool] = ..., json_value: _Optional[str] = ..., last: _Optional[bool] = ..., tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("steps", "tensors")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[SampleStep]
    tensors: _containers.RepeatedCompositeFieldContainer[SampleTensor]
    def __init__(self, steps: _Optional[_Iterable[_Union[SampleStep, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[SampleTensor, _Mapping]]] = ...) -> None: ...

class SampleStep(_message.Message):
    __slots__ = ("sample_index", "step_index", "log_prob", "noise_std", "policy_version")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    NOISE_STD_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    step_index: int
    log_prob: float
    noise_std: float
    policy_version: int
    def __init__(self, sample_index: _Optional[int] = ..., step_index: _Optional[int] = ..., log_prob: _Optional[float] = ..., noise_std: _Optional[float] = ..., policy_version: _Optional[int] = ...) -> None: ...

class SampleTensor(_message.Message):
    __slots__ = ("sample_index", "role", "index", "tensor")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    role: TensorRole
    index: int
    tensor: _tensor_pb2.Tensor
    def __init__(self, sample_index: _Optional[int] = ..., role: _Optional[_Union[TensorRole, str]] = ..., index: _Optional[int] = ..., tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SampleFinished(_message.Message):
    __slots__ = ("sample_index", "error", "num_steps", "digest", "last", "frame_index", "media_format", "media")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FRAME_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    error: SampleError
    num_steps: int
    digest: int
    last: bool
    frame_index: int
    media_format: MediaFormat
    media: _tensor_pb2.Tensor
    def __init__(self, sample_index: _Optional[int] = ..., error: _Optional[_Union[SampleError, _Mapping]] = ..., num_steps: _Optional[int] = ..., digest: _Optional[int] = ..., last: _Optional[bool] = ..., frame_index: _Optional[int] = ..., media_format: _Optional[_Union[MediaFormat, str]] = ..., media: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SampleError(_message.Message):
    __slots__ = ("reason", "message", "step_index")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    message: str
    step_index: int
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., step_index: _Optional[int] = ...) -> None: ...

class RolloutFinished(_message.Message):
    __slots__ = ("num_finished", "num_failed", "num_steps", "tensor_bytes", "digest", "queue_time", "run_time")
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    RUN_TIME_FIELD_NUMBER: _ClassVar[int]
    num_finished: int
    num_failed: int
    num_steps: int
    tensor_bytes: int
    digest: int
    queue_time: _duration_pb2.Duration
    run_time: _duration_pb2.Duration
    def __init__(self, num_finished: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_steps: _Optional[int] = ..., tensor_bytes: _Optional[int] = ..., digest: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., run_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "pipeline_class", "denoisers", "device", "model_dtype", "defaults", "limits", "size_multiple", "video", "batch_invariant", "pipeline_arguments")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_CLASS_FIELD_NUMBER: _ClassVar[int]
    DENOISERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SIZE_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    pipeline_class: str
    denoisers: _containers.RepeatedCompositeFieldContainer[DenoiserInfo]
    device: str
    model_dtype: _tensor_pb2.DataType
    defaults: GenerationDefaults
    limits: Limits
    size_multiple: int
    video: bool
    batch_invariant: bool
    pipeline_arguments: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., pipeline_class: _Optional[str] = ..., denoisers: _Optional[_Iterable[_Union[DenoiserInfo, _Mapping]]] = ..., device: _Optional[str] = ..., model_dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., size_multiple: _Optional[int] = ..., video: _Optional[bool] = ..., batch_invariant: _Optional[bool] = ..., pipeline_arguments: _Optional[_Iterable[str]] = ...) -> None: ...

class DenoiserInfo(_message.Message):
    __slots__ = ("component", "class_name", "merged", "unmerged_reason", "num_parameters")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    UNMERGED_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    component: str
    class_name: str
    merged: bool
    unmerged_reason: str
    num_parameters: int
    def __init__(self, component: _Optional[str] = ..., class_name: _Optional[str] = ..., merged: _Optional[bool] = ..., unmerged_reason: _Optional[str] = ..., num_parameters: _Optional[int] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("num_steps", "pipeline")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    pipeline: PipelineSettings
    def __init__(self, num_steps: _Optional[int] = ..., pipeline: _Optional[_Union[PipelineSettings, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_prompts", "max_prompt_bytes", "max_samples", "max_steps", "max_pixels", "max_frames", "max_request_bytes", "min_event_bytes", "default_event_bytes", "max_event_bytes", "max_running_samples", "max_queued_samples", "max_batch_rows", "max_argument_value")
    MAX_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_EVENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_EVENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_ARGUMENT_VALUE_FIELD_NUMBER: _ClassVar[int]
    max_prompts: int
    max_prompt_bytes: int
    max_samples: int
    max_steps: int
    max_pixels: int
    max_frames: int
    max_request_bytes: int
    min_event_bytes: int
    default_event_bytes: int
    max_event_bytes: int
    max_running_samples: int
    max_queued_samples: int
    max_batch_rows: int
    max_argument_value: int
    def __init__(self, max_prompts: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_steps: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_frames: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., min_event_bytes: _Optional[int] = ..., default_event_bytes: _Optional[int] = ..., max_event_bytes: _Optional[int] = ..., max_running_samples: _Optional[int] = ..., max_queued_samples: _Optional[int] = ..., max_batch_rows: _Optional[int] = ..., max_argument_value: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("serving", "queued_samples", "running_samples", "parked_samples", "open_streams", "policy_version", "denoiser_calls", "denoiser_rows", "pipeline_calls", "engine_restarts", "uptime")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARKED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DENOISER_CALLS_FIELD_NUMBER: _ClassVar[int]
    DENOISER_ROWS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_CALLS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    queued_samples: int
    running_samples: int
    parked_samples: int
    open_streams: int
    policy_version: int
    denoiser_calls: int
    denoiser_rows: int
    pipeline_calls: int
    engine_restarts: int
    uptime: _duration_pb2.Duration
    def __init__(self, serving: _Optional[bool] = ..., queued_samples: _Optional[int] = ..., running_samples: _Optional[int] = ..., parked_samples: _Optional[int] = ..., open_streams: _Optional[int] = ..., policy_version: _Optional[int] = ..., denoiser_calls: _Optional[int] = ..., denoiser_rows: _Optional[int] = ..., pipeline_calls: _Optional[int] = ..., engine_restarts: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
