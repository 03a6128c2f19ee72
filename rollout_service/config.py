"""Settings of a server: flags of `rollout serve`, or environment variables with the prefix ROLLOUT_."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic_settings import BaseSettings, SettingsConfigDict

from rollout_service.engine.client import EngineSettings

MIB = 1 << 20


class ServerConfig(BaseSettings):
    """Serve rollouts of one model over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="ROLLOUT_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="rollout serve",
        protected_namespaces=(),
    )

    model: str = "embedded"
    """Checkpoint directory or hub id, or `embedded`: the small model that comes with the service."""
    revision: str | None = None
    """Hub revision of the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype the model is loaded in."""
    device: str = "cpu"
    """Device of the engine: cpu, cuda, cuda:0, ..."""
    threads: int = Field(0, ge=0)
    """CPU threads of the engine; 0 leaves torch's default."""
    address: str = "127.0.0.1:50051"
    """host:port to listen on; port 0 picks a free one."""
    max_batch_rows: PositiveInt = 32
    """Most rows of one denoiser forward; calls are merged up to it, larger ones split."""
    batch_invariant: bool = False
    """Give every forward exactly max-batch-rows rows, so that a sample is bit-identical whatever it is batched with."""
    max_running_samples: PositiveInt = 256
    """Samples that run at once; further ones wait."""
    max_queued_samples: int = Field(1024, ge=0)
    """Samples that may wait; beyond, requests are refused with QUEUE_FULL."""
    max_prompts: PositiveInt = 256
    """Most prompts of one rollout."""
    max_prompt_bytes: PositiveInt = 16384
    """Most UTF-8 bytes of one prompt."""
    max_samples: PositiveInt = 1024
    """Most samples of one rollout."""
    max_steps: PositiveInt = 1000
    """Most steps of one rollout."""
    max_pixels: PositiveInt = 4096 * 4096
    """Most pixels (height * width) of one image or frame."""
    max_frames: PositiveInt = 1024
    """Most frames of one video."""
    max_argument_value: PositiveInt = 4096
    """Largest magnitude of an integer pipeline argument, such as max_sequence_length."""
    max_request_bytes: PositiveInt = 64 * MIB
    """Most bytes of one request, start states included."""
    default_event_bytes: int = Field(MIB, ge=4096, le=16 * MIB)
    """Upper bound of one event where the request does not set max_event_bytes."""
    stream_buffer_bytes: PositiveInt = 32 * MIB
    """Bytes on their way to one reader before its samples are parked."""
    prompt_cache_bytes: int = Field(256 * MIB, ge=0)
    """Bytes of prompt embeddings kept for repeated prompts."""
    policy_store: str | None = None
    """Where policy versions are kept: a directory, or a URL (s3://, gs://, az://); workers that share it serve the same
    versions. Default: a temporary directory that goes with the server."""
    policy_scratch: str | None = None
    """Directory of uploads in progress, which resume when the server is started again with it, and of files in use.
    Default: a temporary directory."""
    max_policy_versions: int = Field(4, ge=2)
    """Policy versions loaded at once, version 0 not counted; unused ones make room, and come back on demand."""
    max_policy_bytes: PositiveInt = 128 << 30
    """Most bytes of one policy file."""
    policy_poll_seconds: PositiveFloat = 0.5
    """How often the store is asked whether another worker has activated a version."""
    start_timeout_seconds: PositiveFloat = 1800
    """How long loading the model may take."""
    drain_seconds: float = Field(30, ge=0)
    """On SIGTERM, how long running rollouts may go on before they end with DRAINING."""

    @property
    def samples_limit(self) -> int:
        """Most samples of one rollout that can ever be admitted."""
        return min(self.max_samples, self.max_running_samples + self.max_queued_samples)

    def engine_settings(self, scratch: str) -> EngineSettings:
        """The part that the engine process is started with; ``scratch`` is a directory for what it puts on disk."""
        names = set(EngineSettings.__dataclass_fields__) - {"scratch"}
        return EngineSettings(scratch=scratch, **{name: getattr(self, name) for name in names})


#: The range that a request may choose `max_event_bytes` from.
MIN_EVENT_BYTES = 4096
MAX_EVENT_BYTES = 16 * MIB
