"""RolloutService over one engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import structlog
from diffusion_rollout.v1 import rollout_pb2 as pb
from diffusion_rollout.v1 import rollout_pb2_grpc, tensor_pb2
from google.protobuf import duration_pb2

import rollout_service
from rollout_service.config import MAX_EVENT_BYTES, MIN_EVENT_BYTES, ServerConfig
from rollout_service.engine.client import (
    DrainingError,
    EngineClient,
    EngineLostError,
    EngineStream,
    PolicyActivatedError,
    QueueFullError,
)
from rollout_service.models.loading import PipelineFacts
from rollout_service.policy.store import PolicyStoreError
from rollout_service.tensors import DATA_TYPES

from .errors import ServiceError, abort, draining, engine_restarted, invalid
from .events import EventWriter
from .policy import store_failed
from .request import ParsedRequest, parse_request
from .versions import PolicyVersions

log = structlog.get_logger(__name__)

_KINDS = {
    None: pb.LOG_PROB_KIND_UNSPECIFIED,
    "gaussian": pb.LOG_PROB_KIND_GAUSSIAN,
    "squared_error": pb.LOG_PROB_KIND_SQUARED_ERROR,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves rollouts of one engine.

    Args:
        engine: the started engine.
        versions: its policy versions.
        config: limits and defaults.
    """

    def __init__(self, engine: EngineClient, versions: PolicyVersions, config: ServerConfig) -> None:
        self._engine, self._versions, self._config = engine, versions, config
        self._started = time.monotonic()
        self._draining = False

    def drain(self) -> None:
        """Admit nothing from now on."""
        self._draining = True

    async def GenerateRollout(self, request: pb.GenerateRolloutRequest, context: grpc.aio.ServicerContext) -> None:
        """See the protocol. Writes to the context, so that a dropped stream raises here and cancels the rollout."""
        rollout_id = uuid.uuid4().hex
        try:
            await self._rollout(request, rollout_id, context.write)
        except ServiceError as error:
            log.info("rollout.ended", rollout_id=rollout_id, reason=error.reason, field=error.field)
            await abort(context, error)

    async def _rollout(
        self,
        request: pb.GenerateRolloutRequest,
        rollout_id: str,
        write: Callable[[pb.GenerateRolloutResponse], Awaitable[None]],
    ) -> None:
        if self._draining:
            raise draining()
        admitted = time.monotonic()
        parsed = parse_request(request, rollout_id, self._engine.facts, self._config)
        stream = await self._submit(request, parsed)
        log.info("rollout.accepted", rollout_id=rollout_id, samples=len(parsed.spec.samples))
        writer = EventWriter(parsed.spec, parsed.max_event_bytes)
        started: float | None = None
        try:
            await write(writer.event(accepted=accepted_event(parsed, stream.queue_position)))
            async for frame in stream.frames():
                if frame.kind == "started":
                    started = time.monotonic()
                if frame.kind == "rejected":
                    raise self._rejected(request, parsed, frame.fields["sample"], frame.fields["problem"])
                for response in writer.events(frame):
                    await write(response)
                stream.ack(frame)
            now = time.monotonic()
            started = started if started is not None else now
            await write(writer.finished(started - admitted, now - started))
            log.info("rollout.finished", rollout_id=rollout_id, seconds=round(now - admitted, 3))
        except EngineLostError as error:
            raise engine_restarted(str(error)) from error
        except DrainingError as error:
            raise draining() from error
        except PolicyActivatedError as error:
            raise ServiceError(grpc.StatusCode.ABORTED, "POLICY_ACTIVATED", str(error)) from error
        finally:
            stream.close()

    async def _submit(self, request: pb.GenerateRolloutRequest, parsed: ParsedRequest) -> EngineStream:
        try:
            choice = await self._versions.resolve(request.policy)
            if self._draining:  # it may have waited
                raise draining()
            # No await between the choice and the submission: what is chosen is loaded now.
            spec = replace(
                parsed.spec,
                policy_version=choice.version,
                policy_pinned=choice.pinned,
                policy_minimum=choice.minimum,
            )
            return self._engine.submit(spec, parsed.start_latents)
        except QueueFullError as error:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", str(error), retry_after_seconds=1.0
            ) from error
        except EngineLostError as error:
            raise engine_restarted(str(error)) from error
        except PolicyStoreError as error:
            raise store_failed(error) from error

    @staticmethod
    def _rejected(request: pb.GenerateRolloutRequest, parsed: ParsedRequest, sample: int, problem: str) -> ServiceError:
        prompt = parsed.spec.samples[sample].prompt_index
        position = sample - sum(len(p.samples) or p.seed_range.count for p in request.prompts[:prompt])
        return invalid(f"prompts[{prompt}].samples[{position}].start_state.latents", problem)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """See the protocol."""
        return server_info(self._engine.facts, self._config)

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        """See the protocol."""
        try:
            status = await self._engine.status()
        except EngineLostError:
            status = {}
        uptime = duration_pb2.Duration()
        uptime.FromMilliseconds(round((time.monotonic() - self._started) * 1000))
        names = (
            "queued_samples",
            "running_samples",
            "parked_samples",
            "denoiser_calls",
            "denoiser_rows",
            "pipeline_calls",
        )
        return pb.GetStatusResponse(
            serving=self._engine.ready and not self._draining,
            open_streams=self._engine.open_streams,
            engine_restarts=self._engine.restarts,
            policy_version=self._versions.current,
            uptime=uptime,
            **{name: status[name] for name in names if name in status},
        )


def accepted_event(parsed: ParsedRequest, queue_position: int) -> pb.RolloutAccepted:
    """The echo of what a request resolved to."""
    spec = parsed.spec
    dtype = spec.args.latents_dtype
    assert dtype is not None  # parse_request always sets it
    return pb.RolloutAccepted(
        rollout_id=spec.rollout_id,
        queue_position=queue_position,
        samples=[
            pb.ResolvedSample(
                prompt_index=sample.prompt_index,
                seed=sample.seed,
                initial_noise_seed=sample.seed if sample.initial_noise_seed is None else sample.initial_noise_seed,
                start_step=sample.start_step,
            )
            for sample in spec.samples
        ],
        num_steps=spec.num_steps,
        log_prob_kind=_KINDS[spec.args.resolved_log_prob_kind],
        pipeline=pipeline_settings(spec.call_arguments),
        max_event_bytes=parsed.max_event_bytes,
        latents_dtype=DATA_TYPES[dtype],
    )


def pipeline_settings(arguments: dict[str, object]) -> pb.PipelineSettings:
    """Call arguments as a message."""
    settings = pb.PipelineSettings()
    for name, value in arguments.items():
        if name in ("height", "width", "num_frames", "guidance_scale"):
            setattr(settings, name, value)
        elif isinstance(value, bool):
            settings.arguments[name].bool_value = value
        elif isinstance(value, int):
            settings.arguments[name].int_value = value
        elif isinstance(value, float):
            settings.arguments[name].double_value = value
        else:
            settings.arguments[name].string_value = str(value)
    return settings


def server_info(facts: PipelineFacts, config: ServerConfig) -> pb.GetServerInfoResponse:
    """What GetServerInfo answers."""
    shared = (
        "max_prompts",
        "max_prompt_bytes",
        "max_steps",
        "max_pixels",
        "max_frames",
        "max_request_bytes",
        "max_argument_value",
        "max_running_samples",
        "max_queued_samples",
        "max_batch_rows",
        "default_event_bytes",
    )
    return pb.GetServerInfoResponse(
        version=rollout_service.__version__,
        model=facts.model,
        pipeline_class=facts.pipeline_class,
        denoisers=[pb.DenoiserInfo(**denoiser) for denoiser in facts.denoisers],
        device=facts.device,
        model_dtype=getattr(tensor_pb2, f"DATA_TYPE_{facts.model_dtype.upper()}"),
        defaults=pb.GenerationDefaults(
            num_steps=facts.default_steps, pipeline=pipeline_settings(facts.default_arguments)
        ),
        limits=pb.Limits(
            min_event_bytes=MIN_EVENT_BYTES,
            max_event_bytes=MAX_EVENT_BYTES,
            max_samples=config.samples_limit,
            **{name: getattr(config, name) for name in shared},
        ),
        size_multiple=facts.size_multiple,
        video=facts.video,
        batch_invariant=config.batch_invariant and all(denoiser["merged"] for denoiser in facts.denoisers),
        pipeline_arguments=sorted(facts.arguments),
    )
