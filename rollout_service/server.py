"""A server: an engine, its gRPC front, health and reflection."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import grpc
import structlog
from diffusion_rollout.v1 import policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_service.config import ServerConfig
from rollout_service.engine.client import DrainingError, EngineClient
from rollout_service.rpc.malformed import MalformedRequestInterceptor
from rollout_service.rpc.policy import PolicyServicer
from rollout_service.rpc.servicer import RolloutServicer
from rollout_service.rpc.versions import PolicyVersions

log = structlog.get_logger(__name__)

ROLLOUT_SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
POLICY_SERVICE = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"].full_name

#: How long streams have to send their last status, after which a reader that does not read is cut.
LAST_WORDS_SECONDS = 2.0

#: What a message may have beyond its payload: a bound on requests that the protocol's own limit does not reach.
_REQUEST_OVERHEAD = 1 << 20


class Server:
    """Use as an async context manager: the engine is up and the port bound inside it.

    Args:
        config: everything there is to set.

    Raises:
        ModelError: on entering, when the model cannot be served.
        PolicyStoreError: on entering, when the policy store or its current version cannot be used.
        OSError: on entering, when the address cannot be bound.
    """

    def __init__(self, config: ServerConfig) -> None:
        # What was not given a place of its own goes with the server.
        self._temporary = tempfile.TemporaryDirectory(prefix="rollout-")
        own = Path(self._temporary.name)
        self.config = config = config.model_copy(
            update={
                "policy_store": config.policy_store or str(own / "store"),
                "policy_scratch": config.policy_scratch or str(own / "scratch"),
            }
        )
        (own / "engine").mkdir()
        self.engine = EngineClient(config.engine_settings(str(own / "engine")), self._engine_changed)
        self.versions = PolicyVersions(self.engine, config)
        self.port = 0
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servicer = RolloutServicer(self.engine, self.versions, config)
        self._policy_servicer = PolicyServicer(self.versions, config)
        self._server: grpc.aio.Server | None = None
        self._started = False
        self._draining = False
        self._health_tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self.config.max_request_bytes + _REQUEST_OVERHEAD),
                ("grpc.so_reuseport", 0),
            ],
            interceptors=[MalformedRequestInterceptor()],
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self._servicer, server)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(self._policy_servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (ROLLOUT_SERVICE, POLICY_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            self.port = server.add_insecure_port(self.config.address)
        except RuntimeError as error:
            raise OSError(f"address: {self.config.address} cannot be bound; pass a free host:port") from error
        await self._set_health(False)
        try:
            await self.engine.start()
            await self.versions.start()
            await server.start()
        except BaseException:
            await self.versions.stop()
            await self.engine.stop()
            await server.stop(None)
            self._temporary.cleanup()
            raise
        self._server, self._started = server, True
        await self._set_health(self.engine.ready)
        log.info("server.started", port=self.port, model=self.engine.facts.model)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.drain()

    async def drain(self) -> None:
        """Admit nothing more, let running rollouts end for ``drain_seconds``, then stop."""
        if self._draining:
            return
        self._draining = True
        self._servicer.drain()
        self._policy_servicer.drain()
        await self._set_health(False)
        # New rollouts are refused with DRAINING, running ones go on; those left when the time is up end with DRAINING.
        deadline = asyncio.get_running_loop().time() + self.config.drain_seconds
        while self.engine.open_streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self.engine.end_streams(DrainingError("the server stops"))
        if self._server is not None:
            await self._server.stop(LAST_WORDS_SECONDS)
        await self.versions.stop()
        await self.engine.stop()
        self._temporary.cleanup()
        log.info("server.stopped")

    def _engine_changed(self, up: bool) -> None:
        if not up:
            self.versions.engine_down()
        if not self._started:
            return
        task = asyncio.get_running_loop().create_task(self._follow_engine(up))
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _follow_engine(self, up: bool) -> None:
        if up:
            await self.versions.engine_up()
        await self._set_health(up and self.engine.ready and not self._draining)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", ROLLOUT_SERVICE, POLICY_SERVICE):
            await self._health.set(service, status)
