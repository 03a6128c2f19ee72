"""One server for the whole folder: a tiny real SD3 pipeline, with limits that are cheap to go over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from diffusion_rollout.v1 import rollout_pb2_grpc

from tests.rpc.support import LIMITS, NARROW
from tests.support.serving import RunningServer, running_server, save_family
from trainer_client import RolloutClient


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved checkpoint."""
    return save_family("sd3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def service(model_path: Path) -> Iterator[RunningServer]:
    """The server."""
    with running_server(model_path, **LIMITS) as server:
        yield server


@pytest.fixture(scope="session")
def channel(service: RunningServer) -> Iterator[grpc.Channel]:
    """A channel with gRPC's own defaults."""
    with grpc.insecure_channel(service.target) as channel:
        yield channel


@pytest.fixture(scope="session")
def stub(channel: grpc.Channel) -> rollout_pb2_grpc.RolloutServiceStub:
    """The generated stub: what a client in any language has."""
    return rollout_pb2_grpc.RolloutServiceStub(channel)


@pytest.fixture(scope="session")
def narrow_stub(service: RunningServer) -> Iterator[rollout_pb2_grpc.RolloutServiceStub]:
    """A stub whose unread streams block the server soon."""
    with grpc.insecure_channel(service.target, NARROW) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


@pytest.fixture(scope="session")
def client(service: RunningServer) -> Iterator[RolloutClient]:
    """The client library."""
    with RolloutClient(service.target) as client:
        yield client
