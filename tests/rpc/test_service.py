"""What is served beside rollouts: health, reflection, information and status."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from diffusion_rollout.v1 import policy_pb2
from diffusion_rollout.v1 import rollout_pb2 as pb
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from rollout_service.config import MAX_EVENT_BYTES, MIN_EVENT_BYTES
from tests.rpc.support import LIMITS, idle, request, wait_until
from tests.support.serving import RunningServer
from trainer_client import RolloutClient

SERVICES = ("diffusion_rollout.v1.RolloutService", "diffusion_rollout.v1.PolicyService")


@pytest.mark.parametrize("name", ["", SERVICES[0]])
def test_health(channel: grpc.Channel, name: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    response = stub.Check(health_pb2.HealthCheckRequest(service=name))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_every_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) >= {*SERVICES, "grpc.health.v1.Health"}
    pool = DescriptorPool(database)
    for name, own in zip(SERVICES, (pb.DESCRIPTOR, policy_pb2.DESCRIPTOR), strict=True):
        service = pool.FindServiceByName(name)
        assert [method.name for method in service.methods] == [
            method.name for method in own.services_by_name[name.rpartition(".")[2]].methods
        ]
    described = pool.FindMessageTypeByName("diffusion_rollout.v1.GenerateRolloutRequest")
    assert list(described.fields_by_name) == list(pb.GenerateRolloutRequest.DESCRIPTOR.fields_by_name)


def test_server_info(stub: Any, client: RolloutClient) -> None:
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info == stub.GetServerInfo(pb.GetServerInfoRequest()) == client.server_info()
    assert info.version
    assert (info.model, info.pipeline_class, info.device) == ("sd3", "StableDiffusion3Pipeline", "cpu")
    (denoiser,) = info.denoisers
    assert (denoiser.component, denoiser.class_name) == ("transformer", "SD3Transformer2DModel")
    assert denoiser.merged
    assert denoiser.unmerged_reason == ""
    assert denoiser.num_parameters > 0
    assert (info.defaults.num_steps, info.defaults.pipeline.height, info.defaults.pipeline.width) == (4, 64, 48)
    assert info.defaults.pipeline.guidance_scale == 4.5
    assert info.defaults.pipeline.arguments["max_sequence_length"].int_value == 64
    assert (info.size_multiple, info.video, info.batch_invariant) == (16, False, False)
    assert "max_sequence_length" in info.pipeline_arguments
    assert not {"prompt", "latents", "generator", "num_images_per_prompt"} & set(info.pipeline_arguments)
    for name in set(LIMITS) - {"stream_buffer_bytes"}:
        assert getattr(info.limits, name) == LIMITS[name]
    assert (info.limits.min_event_bytes, info.limits.max_event_bytes) == (MIN_EVENT_BYTES, MAX_EVENT_BYTES)
    unset = [name for name in info.limits.DESCRIPTOR.fields_by_name if not getattr(info.limits, name)]
    assert not unset


def test_status_counts_what_was_done(client: RolloutClient, service: RunningServer) -> None:
    wait_until(lambda: idle(client))
    before = client.status()
    assert before.serving
    client.send(request(prompts=("seed_range { count: 3 }",)), timeout=60).collect()
    after = client.status()
    # Guidance in one call: two rows of each sample, in each of four steps.
    assert after.pipeline_calls - before.pipeline_calls == 4
    assert after.denoiser_calls - before.denoiser_calls == 4
    assert after.denoiser_rows - before.denoiser_rows == 4 * 3 * 2
    assert after.uptime.ToTimedelta() > before.uptime.ToTimedelta()
    assert (after.policy_version, after.engine_restarts) == (0, service.server.engine.restarts)
