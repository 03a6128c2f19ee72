"""PolicyService on real servers: what is uploaded is what runs, and nothing else ever does."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusion_rollout.v1 import policy_pb2 as pb
from diffusion_rollout.v1 import policy_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from peft import get_peft_model_state_dict
from safetensors.torch import load as parse_file

from tests.conftest import ServerPool
from tests.rpc.support import refusal
from tests.support.policies import add_lora, chunks, content, header, perturb, randomise_lora, upload
from tests.support.serving import RunningServer, running_server
from tests.support.tiny_pipelines import FAMILIES
from trainer_client import (
    Event,
    LoraSettings,
    PolicyActivatedError,
    PolicyConflictError,
    PolicyUnavailableError,
    RolloutClient,
    RolloutError,
    Step,
    Trajectory,
    local_fingerprint,
    replay,
)
from trainer_client.trajectory import TrajectoryBuilder

PROMPT = "red circle top left"
FAST_FAMILY = "sd3"
EVERY_FAMILY = [pytest.param(name, marks=() if name == FAST_FAMILY else pytest.mark.slow) for name in FAMILIES]
DTYPES = ["float32", "bfloat16", "float16"]
EVERY_DTYPE = [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])]
MODES = ["new_rollouts", "next_step", "abort"]
SWAP_SECONDS = 10.0


#: Versions only go up, and tests share servers.
VERSIONS = itertools.count(1)


@pytest.fixture
def one() -> int:
    """A version that no test has used."""
    return next(VERSIONS)


@pytest.fixture
def two(one: int) -> int:
    """The version after it."""
    return next(VERSIONS)


@pytest.fixture
def server(server_pool: ServerPool) -> RunningServer:
    return server_pool(FAST_FAMILY)


@pytest.fixture
def client(server: RunningServer) -> Iterator[RolloutClient]:
    with RolloutClient(server.target) as client:
        yield client
        client.activate_policy(0)


@pytest.fixture
def stub(server: RunningServer) -> Iterator[Any]:
    with policies(server.target) as stub:
        yield stub


@contextmanager
def policies(target: str) -> Iterator[Any]:
    with grpc.insecure_channel(target) as channel:
        yield policy_pb2_grpc.PolicyServiceStub(channel)


@pytest.fixture
def pipe(load_family: Callable[..., DiffusionPipeline]) -> DiffusionPipeline:
    return load_family(FAST_FAMILY)


def generate(client: RolloutClient, **settings: Any) -> Trajectory:
    defaults: dict[str, Any] = {"samples_per_prompt": 2, "seed": 3, "noise_level": 0.7}
    return client.generate(PROMPT, **(defaults | settings)).collect()


class Running:
    """A rollout that is read event by event."""

    def __init__(self, client: RolloutClient, **settings: Any) -> None:
        self.stream = client.generate(PROMPT, seed=3, noise_level=0.7, max_event_bytes=4096, **settings)
        self._builder = TrajectoryBuilder(self.stream.request)
        self._events = iter(self.stream)

    def read(self, until: Callable[[Event], bool] = lambda event: False) -> None:
        """Up to an event, or to the end."""
        for event in self._events:
            self._builder.add(event)
            if until(event):
                return

    def finish(self) -> Trajectory:
        """Read the rest."""
        self.read()
        return self._builder.build()


def assert_replays(pipe: DiffusionPipeline, trajectory: Trajectory) -> None:
    """With the same weights a replay gives every log-prob of the rollout bit for bit."""
    steps = list(replay(pipe, trajectory, grad=False))
    assert len(steps) == len(trajectory.stochastic_steps) > 0
    for step in steps:
        column = trajectory.stochastic_steps.index(step.step_index)
        assert torch.equal(step.log_prob, trajectory.log_probs[list(step.sample_indices), column])


# -- what is uploaded is what runs


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_version_is_served_exactly(
    family: str, kind: str, dtype: str, server_pool: ServerPool, load_family: Any, one: int
) -> None:
    """Rollouts replay bit for bit with the trainer's own module, and the fingerprint is that of its weights."""
    pipe = load_family(family, getattr(torch, dtype))
    settings = {} if dtype == "float32" else {"dtype": dtype}
    with RolloutClient(server_pool(family, **settings).target) as client:
        base = generate(client)
        base_fingerprint = client.get_policy(0).fingerprint
        assert base_fingerprint == local_fingerprint(pipe.transformer)
        if kind == "lora":
            module = add_lora(pipe, seed=1)
        else:
            module = pipe.transformer
            perturb(module, seed=1)
        pushed = client.push_policy(module, one)
        assert pushed.state == pb.POLICY_STATE_CURRENT
        assert pushed.bound_tensors == pushed.expected_tensors > 0
        assert pushed.fingerprint == local_fingerprint(module)
        trajectory = generate(client)
        assert trajectory.policy_versions.unique().tolist() == [one]
        assert_replays(pipe, trajectory)
        assert not torch.equal(trajectory.latents, base.latents)
        # The base is still there, bit for bit.
        client.activate_policy(0)
        assert client.get_policy(0).fingerprint == base_fingerprint
        again = generate(client)
        assert torch.equal(again.latents, base.latents)
        assert torch.equal(again.log_probs, base.log_probs)


def peft_names(name: str) -> str:
    return "base_model.model." + name


def diffusers_names(name: str) -> str:
    return "transformer." + name


def old_diffusers_names(name: str) -> str:
    return name.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up.")


@pytest.mark.parametrize("rename", [str, peft_names, diffusers_names, old_diffusers_names])
def test_every_naming_of_a_lora_binds(
    rename: Callable[[str], str], client: RolloutClient, pipe: Any, stub: Any, one: int
) -> None:
    module = add_lora(pipe, seed=1)
    state = {rename(name): tensor for name, tensor in get_peft_model_state_dict(module).items()}
    pushed = client.push_policy(state, one, lora=LoraSettings(4, 8))
    assert pushed.fingerprint == local_fingerprint(module)
    assert_replays(pipe, generate(client))


@pytest.mark.parametrize("prefix", ["", "transformer.", "base_model.model.", "transformer.base_model.model."])
def test_every_naming_of_full_weights_binds(prefix: str, client: RolloutClient, pipe: Any, one: int) -> None:
    state = {prefix + name: tensor for name, tensor in perturb(pipe.transformer, seed=1).items()}
    assert client.push_policy(state, one).fingerprint == local_fingerprint(pipe.transformer)
    assert_replays(pipe, generate(client))


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_weights_of_any_dtype_are_cast_as_torch_does(
    dtype: str, client: RolloutClient, pipe: Any, one: int
) -> None:
    state = {name: t.to(getattr(torch, dtype)) for name, t in perturb(pipe.transformer, seed=1).items()}
    pipe.transformer.load_state_dict(state)
    assert client.push_policy(state, one).fingerprint == local_fingerprint(pipe.transformer)
    assert_replays(pipe, generate(client))


def test_rank_and_alpha_of_each_module_are_honoured(client: RolloutClient, pipe: Any, one: int, two: int) -> None:
    module = add_lora(pipe, seed=1, rank=4, alpha=2, rank_pattern={"to_q": 8}, alpha_pattern={"net.2": 32})
    client.push_policy(module, one)
    assert_replays(pipe, generate(client))
    # The same tensors with another alpha are another policy.
    state = get_peft_model_state_dict(module)
    client.push_policy(state, two, lora=LoraSettings(4, 8, {"to_q": 8}, {"net.2": 32}))
    assert not torch.equal(generate(client).log_probs, generate(client, policy_exactly=one).log_probs)


# -- refused, with nothing changed


def lora_file(pipe: Any, **settings: Any) -> dict[str, torch.Tensor]:
    return get_peft_model_state_dict(add_lora(pipe, seed=1, **settings))


def first_key(tensors: dict[str, torch.Tensor], ending: str = "") -> str:
    return next(name for name in tensors if name.endswith(ending))


def without_one(tensors: dict[str, torch.Tensor]) -> bytes:
    del tensors[first_key(tensors)]
    return content(tensors)


def with_another(tensors: dict[str, torch.Tensor]) -> bytes:
    return content(tensors | {"nowhere.lora_A.weight": torch.zeros(4, 4)})


def with_foreign_prefix(tensors: dict[str, torch.Tensor]) -> bytes:
    return content({"text_encoder." + name: tensor for name, tensor in tensors.items()})


def misshapen(tensors: dict[str, torch.Tensor]) -> bytes:
    name = first_key(tensors)
    return content(tensors | {name: torch.zeros(3, 5)})


def with_value(value: float) -> Callable[[dict[str, torch.Tensor]], bytes]:
    def spoil(tensors: dict[str, torch.Tensor]) -> bytes:
        name = first_key(tensors)
        spoilt = tensors[name].clone()
        spoilt.view(-1)[-1] = value
        return content(tensors | {name: spoilt})

    return spoil


def with_integers(tensors: dict[str, torch.Tensor]) -> bytes:
    name = first_key(tensors)
    return content(tensors | {name: tensors[name].to(torch.int32)})


def twice(tensors: dict[str, torch.Tensor]) -> bytes:
    name = first_key(tensors)
    return content(tensors | {"transformer." + name: tensors[name]})


def empty(tensors: dict[str, torch.Tensor]) -> bytes:
    return content({})


def pickled(tensors: dict[str, torch.Tensor]) -> bytes:
    return pickle.dumps({name: tensor.numpy() for name, tensor in tensors.items()})


def dotted(tensors: dict[str, torch.Tensor]) -> bytes:
    return content({"../../" + name: tensor for name, tensor in tensors.items()})


def torn_header(tensors: dict[str, torch.Tensor]) -> bytes:
    return content(tensors)[:100]


#: What is wrong with a file -> the list of names that says so.
BAD_FILES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], bytes], str | None]] = {
    "missing": (without_one, "missing"),
    "extra": (with_another, "unknown"),
    "foreign prefix": (with_foreign_prefix, "unknown"),
    "wrong shape": (misshapen, "misshapen"),
    "nan": (with_value(float("nan")), "non_finite"),
    "infinite": (with_value(float("-inf")), "non_finite"),
    "integers": (with_integers, "misshapen"),
    "twice": (twice, "unknown"),
    "empty": (empty, None),
    "pickle": (pickled, None),
    "path with ..": (dotted, "unknown"),
    "torn header": (torn_header, None),
}


@contextmanager
def nothing_changes(server: RunningServer, client: RolloutClient, one: int) -> Iterator[None]:
    """The old policy keeps serving, and nothing is left in the store."""

    def state() -> Any:
        store = Path(server.server.config.policy_store or "")
        files = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
        current = client.get_policy(one)
        listed = [(p.version, p.state) for p in client.list_policies() if p.version <= one]
        return files, current.fingerprint, listed, client.status().policy_version

    before, rollout = state(), generate(client)
    yield
    assert state() == before
    after = generate(client)
    assert after.policy_versions.unique().tolist() == [one]
    assert torch.equal(after.latents, rollout.latents)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_bad_content_is_refused(
    kind: str, server: RunningServer, client: RolloutClient, stub: Any, pipe: Any, one: int, two: int
) -> None:
    rank = 4 if kind == "lora" else None
    good = lora_file(pipe) if kind == "lora" else pipe.transformer.state_dict()
    client.push_policy(good, one, lora=LoraSettings(4, 8) if rank else None)
    with nothing_changes(server, client, one):
        for what, (spoil, names) in BAD_FILES.items():
            data = spoil(dict(good))
            error = refusal(lambda: stub.UploadPolicy(upload(header(two, data, rank), data)))  # noqa: B023
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), (what, error)
            if names is not None:
                assert int(error.metadata[f"{names}_count"]) >= 1, (what, error)
                assert error.metadata[names], (what, error)
                assert names.replace("_", "-") in error.message, (what, error)
            gone = refusal(lambda: stub.GetPolicy(pb.GetPolicyRequest(version=two)))
            assert gone.reason == "POLICY_UNAVAILABLE", what


def test_many_bad_names_are_counted_and_the_first_shown(client: RolloutClient, stub: Any, pipe: Any, one: int) -> None:
    names = {f"block.{'x' * 300}.{i}": torch.zeros(1) for i in range(500)}
    data = content(names)
    error = refusal(lambda: stub.UploadPolicy(upload(header(one, data, None), data)))
    assert error.metadata["unknown_count"] == "500"
    assert error.metadata["missing_count"] == str(len(pipe.transformer.state_dict()))
    shown = error.metadata["missing"].split("\n")
    assert len(shown) == 20
    assert set(shown) <= {f"transformer.{name}" for name in pipe.transformer.state_dict()}


def corrupt_chunk(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    for message in upload(header(version, data), data):
        if message.chunk.offset == 1 << 14:
            message.chunk.data = bytes([message.chunk.data[0] ^ 1]) + message.chunk.data[1:]
        yield message


def wrong_digest(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    return upload(header(version, data, sha256=bytes(32)), data)


def truncated(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    return upload(header(version, data), data, end=len(data) - 1)


def too_long(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    return upload(header(version, data, size_bytes=len(data) - 1), data)


def gap(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    return upload(header(version, data), data, start=1)


def no_header(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    return chunks(data)


def nothing(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    return iter(())


def two_headers(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    yield pb.UploadPolicyRequest(header=header(version, data))
    yield from upload(header(version, data), data)


def empty_message(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    yield pb.UploadPolicyRequest(header=header(version, data))
    yield pb.UploadPolicyRequest()


def empty_chunk(data: bytes, version: int) -> Iterator[pb.UploadPolicyRequest]:
    yield pb.UploadPolicyRequest(header=header(version, data))
    yield pb.UploadPolicyRequest(chunk=pb.PolicyChunk())


def head(version: int | None = None, **fields: Any) -> Callable[[bytes, int], Iterator[pb.UploadPolicyRequest]]:
    return lambda data, new: upload(header(new if version is None else version, data, **fields), data)


#: Messages of an upload -> code, reason, field.
BAD_UPLOADS: dict[str, tuple[Callable[[bytes, int], Iterator[pb.UploadPolicyRequest]], str, str, str]] = {
    "corrupt chunk": (corrupt_chunk, "DATA_LOSS", "CHECKSUM_MISMATCH", "chunk.crc32c"),
    "wrong digest": (wrong_digest, "DATA_LOSS", "CHECKSUM_MISMATCH", ""),
    "truncated": (truncated, "DATA_LOSS", "CHECKSUM_MISMATCH", ""),
    "too long": (too_long, "INVALID_ARGUMENT", "INVALID_FIELD", "chunk.data"),
    "gap": (gap, "INVALID_ARGUMENT", "INVALID_FIELD", "chunk.offset"),
    "no header": (no_header, "INVALID_ARGUMENT", "INVALID_FIELD", "header"),
    "nothing": (nothing, "INVALID_ARGUMENT", "INVALID_FIELD", "header"),
    "two headers": (two_headers, "INVALID_ARGUMENT", "INVALID_FIELD", "chunk"),
    "empty message": (empty_message, "INVALID_ARGUMENT", "INVALID_FIELD", "chunk"),
    "empty chunk": (empty_chunk, "INVALID_ARGUMENT", "INVALID_FIELD", "chunk.data"),
    "goes back": (head(version=0), "INVALID_ARGUMENT", "INVALID_FIELD", "header.version"),
    "huge version": (head(version=1 << 63), "INVALID_ARGUMENT", "INVALID_FIELD", "header.version"),
    "no kind": (head(kind=0), "INVALID_ARGUMENT", "INVALID_FIELD", "header.kind"),
    "unknown kind": (head(kind=9), "INVALID_ARGUMENT", "INVALID_FIELD", "header.kind"),
    "no size": (head(size_bytes=0), "INVALID_ARGUMENT", "INVALID_FIELD", "header.size_bytes"),
    "huge size": (head(size_bytes=1 << 60), "INVALID_ARGUMENT", "OVER_LIMIT", "header.size_bytes"),
    "short digest": (head(sha256=b"x"), "INVALID_ARGUMENT", "INVALID_FIELD", "header.sha256"),
    "rank of full weights": (head(kind=1), "INVALID_ARGUMENT", "INVALID_FIELD", "header.lora_rank"),
    "no rank": (head(rank=None, kind=2), "INVALID_ARGUMENT", "INVALID_FIELD", "header.lora_rank"),
    "rank 0": (head(rank=0), "INVALID_ARGUMENT", "INVALID_FIELD", "header.lora_rank"),
    "nan alpha": (head(alpha=float("nan")), "INVALID_ARGUMENT", "INVALID_FIELD", "header.lora_alpha"),
    "infinite alpha": (head(alpha=float("inf")), "INVALID_ARGUMENT", "INVALID_FIELD", "header.lora_alpha"),
    "huge alpha": (head(alpha=1e300), "INVALID_ARGUMENT", "INVALID_FIELD", "header.lora_alpha"),
    "wrong rank": (head(rank=8), "INVALID_ARGUMENT", "INVALID_FIELD", "content"),
    "huge rank": (head(rank=(1 << 32) - 1), "INVALID_ARGUMENT", "INVALID_FIELD", "content"),
}


def test_bad_uploads_are_refused(
    server: RunningServer, client: RolloutClient, stub: Any, pipe: Any, one: int, two: int
) -> None:
    data = content(lora_file(pipe))
    stub.UploadPolicy(upload(header(one, data), data))
    stub.ActivatePolicy(pb.ActivatePolicyRequest(version=one))
    with nothing_changes(server, client, one):
        for what, (messages, code, reason, field) in BAD_UPLOADS.items():
            error = refusal(lambda: stub.UploadPolicy(messages(data, two)))  # noqa: B023
            assert (error.code.name, error.reason, error.field) == (code, reason, field), (what, error)
            assert error.message, what
        error = refusal(lambda: stub.UploadPolicy(upload(header(one, data, alpha=9), data)))
        assert (error.code.name, error.reason, error.field) == ("ALREADY_EXISTS", "POLICY_CONFLICT", "header.version")


def test_a_version_that_goes_back_is_refused(stub: Any, pipe: Any, one: int, two: int) -> None:
    data = content(lora_file(pipe))
    stub.UploadPolicy(upload(header(two, data), data))
    error = refusal(lambda: stub.UploadPolicy(upload(header(one, data), data)))
    assert (error.reason, error.field) == ("INVALID_FIELD", "header.version")
    assert f"more than {two}" in error.message


def test_pushing_the_same_again_changes_nothing(client: RolloutClient, pipe: Any, one: int) -> None:
    module = add_lora(pipe, seed=1)
    first = client.push_policy(module, one)
    again = client.push_policy(module, one)
    assert (again.sha256, again.create_time, again.fingerprint) == (first.sha256, first.create_time, first.fingerprint)
    randomise_lora(module, seed=2)
    with pytest.raises(PolicyConflictError):
        client.push_policy(module, one)
    assert client.get_policy(one).fingerprint == first.fingerprint


@pytest.mark.parametrize("cut", [0, 1, 1000, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, -1])
def test_a_cut_upload_resumes_at_the_committed_bytes(cut: int, stub: Any, pipe: Any, one: int) -> None:
    data = content(lora_file(pipe))
    cut %= len(data)
    error = refusal(lambda: stub.UploadPolicy(upload(header(one, data), data, end=cut)))
    assert error.code is grpc.StatusCode.DATA_LOSS
    state = stub.GetPolicy(pb.GetPolicyRequest(version=one)).policy
    assert (state.state, state.committed_bytes, state.size_bytes) == (pb.POLICY_STATE_UPLOADING, cut, len(data))
    assert stub.ListPolicies(pb.ListPoliciesRequest()).policies[0] == state
    assert refusal(lambda: stub.ActivatePolicy(pb.ActivatePolicyRequest(version=one))).reason == "POLICY_UNAVAILABLE"
    done = stub.UploadPolicy(upload(header(one, data), data, start=cut)).policy
    assert (done.state, done.size_bytes) == (pb.POLICY_STATE_READY, len(data))


# -- activation


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("mode", MODES)
def test_what_an_activation_does_to_a_running_rollout(
    mode: str, kind: str, client: RolloutClient, pipe: Any, load_family: Any, one: int
) -> None:
    """Each step replays exactly under the version that it names."""
    modules = {0: load_family(FAST_FAMILY), one: pipe}
    module = add_lora(pipe, seed=1) if kind == "lora" else pipe.transformer
    if kind == "full":
        perturb(module, seed=1)
    client.push_policy(module, one, activate=False)
    running = Running(client, samples_per_prompt=2, num_steps=40)
    running.read(until=lambda event: isinstance(event, Step) and event.step_index == 3)
    activated = threading.Thread(target=client.activate_policy, args=(one,), kwargs={"mode": mode})
    activated.start()
    if mode == "abort":
        with pytest.raises(PolicyActivatedError) as aborted:
            running.finish()
        assert aborted.value.reason == "POLICY_ACTIVATED"
        activated.join(30)
        assert generate(client).policy_versions.unique().tolist() == [one]
        return
    trajectory = running.finish()
    activated.join(30)
    versions = trajectory.policy_versions
    for sample in versions.tolist():
        assert sample == sorted(sample), "versions only go up"
    if mode == "new_rollouts":
        assert versions.unique().tolist() == [0]
    else:
        assert versions.unique().tolist() == [0, one]
    for version in versions.unique().tolist():
        steps = [k for k in trajectory.stochastic_steps if int(versions[0, k]) == version]
        for step in replay(modules[version], trajectory, steps=steps, grad=False):
            column = trajectory.stochastic_steps.index(step.step_index)
            assert torch.equal(step.log_prob, trajectory.log_probs[:, column])
    assert generate(client).policy_versions.unique().tolist() == [one]


def test_a_pinned_rollout_does_not_switch(client: RolloutClient, pipe: Any, one: int) -> None:
    client.push_policy(add_lora(pipe, seed=1), one, activate=False)
    running = Running(client, num_steps=30, policy_exactly=0)
    running.read(until=lambda event: isinstance(event, Step))
    client.activate_policy(one, mode="next_step")
    assert running.finish().policy_versions.unique().tolist() == [0]


def test_compare_and_set(client: RolloutClient, pipe: Any, one: int) -> None:
    module = add_lora(pipe, seed=1)
    client.push_policy(module, one)
    with pytest.raises(PolicyConflictError, match=f"version {one} is current"):
        client.activate_policy(0, expected_current_version=0)
    assert client.activate_policy(0, expected_current_version=one).version == 0
    with pytest.raises(PolicyUnavailableError):
        client.activate_policy(10**9)
    assert client.status().policy_version == 0


def test_requirements(client: RolloutClient, pipe: Any, one: int, two: int) -> None:
    module = add_lora(pipe, seed=1)
    client.push_policy(module, one)
    for settings in ({"policy_exactly": 0}, {"policy_exactly": one}, {"policy_at_least": one}, {"policy_at_least": 0}):
        expected = settings.get("policy_exactly", one)
        assert generate(client, **settings).policy_versions.unique().tolist() == [expected]
    for settings in ({"policy_exactly": two}, {"policy_at_least": two}):
        with pytest.raises(PolicyUnavailableError):
            generate(client, **settings)
        with pytest.raises(PolicyUnavailableError, match="max_wait"):
            generate(client, **settings, policy_max_wait=timedelta(seconds=0.2))
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(generate, client, **settings, policy_max_wait=timedelta(seconds=60))
            for settings in ({"policy_exactly": two}, {"policy_at_least": two})
        ]
        time.sleep(0.3)
        randomise_lora(module, seed=2)
        client.push_policy(module, two)
        for future in waiting:
            assert future.result(60).policy_versions.unique().tolist() == [two]


@pytest.mark.slow
def test_more_versions_than_are_kept_loaded(checkpoints: dict[str, Path], pipe: Any) -> None:
    """Unused ones make room, and come back on demand; each is itself whenever it runs."""
    module = add_lora(pipe, seed=0)
    with (
        running_server(checkpoints[FAST_FAMILY], max_policy_versions=2) as server,
        RolloutClient(server.target) as client,
    ):
        for version in range(1, 6):
            randomise_lora(module, seed=version)
            client.push_policy(module, version)
        for version in (1, 4, 2, 5, 3, 1):
            randomise_lora(module, seed=version)
            trajectory = generate(client, policy_exactly=version)
            assert_replays(pipe, trajectory)
            assert client.get_policy(version).fingerprint == local_fingerprint(module)
        assert sum(p.fingerprint != 0 for p in client.list_policies()) <= 3  # with the base
        assert client.status().policy_version == 5


def test_mixed_versions_run_together_and_never_mix(
    client: RolloutClient, pipe: Any, load_family: Any, one: int, two: int
) -> None:
    """Rollouts on the base, two LoRA versions and full weights at once: each is what it would be alone."""
    module = add_lora(pipe, seed=0)
    for version in (one, two):
        randomise_lora(module, seed=version)
        client.push_policy(module, version, activate=False)
    other = load_family(FAST_FAMILY)
    perturb(other.transformer, seed=3)
    full = next(VERSIONS)
    client.push_policy(other.transformer, full, activate=False)
    order = [0, one, two, full, two, one, 0, full]
    with ThreadPoolExecutor(len(order)) as pool:
        found = list(pool.map(lambda version: generate(client, policy_exactly=version, num_steps=8), order))
    for version, trajectory in zip(order, found, strict=True):
        assert trajectory.policy_versions.unique().tolist() == [version]
        if version in (one, two):
            randomise_lora(module, seed=version)
        own = {0: load_family(FAST_FAMILY), full: other}.get(version, pipe)
        for step in replay(own, trajectory, grad=False):
            column = trajectory.stochastic_steps.index(step.step_index)
            torch.testing.assert_close(step.log_prob, trajectory.log_probs[:, column], rtol=0, atol=2e-5)


def test_delete(client: RolloutClient, pipe: Any, one: int, two: int) -> None:
    module = add_lora(pipe, seed=1)
    for version in (one, two):
        randomise_lora(module, seed=version)
        client.push_policy(module, version)
    for version in (0, two):
        with pytest.raises(PolicyConflictError):
            client.delete_policy(version)
    running = Running(client, num_steps=200, policy_exactly=one)
    running.read(until=lambda event: isinstance(event, Step))
    with pytest.raises(PolicyConflictError, match="in use"):
        client.delete_policy(one)
    running.stream.cancel()
    deadline = time.monotonic() + 10
    while client.status().open_streams and time.monotonic() < deadline:
        time.sleep(0.02)
    client.delete_policy(one)
    for call in (client.delete_policy, client.get_policy):
        with pytest.raises(PolicyUnavailableError):
            call(one)
    with pytest.raises(PolicyUnavailableError):
        generate(client, policy_exactly=one)
    with pytest.raises(RolloutError):
        client.push_policy(module, one)
    assert one not in [p.version for p in client.list_policies()]


def test_pages(client: RolloutClient, stub: Any, pipe: Any) -> None:
    data = content(lora_file(pipe))
    new = [next(VERSIONS) for _ in range(5)]
    for version in new:
        stub.UploadPolicy(upload(header(version, data), data))
    seen, token = [], ""
    while True:
        page = stub.ListPolicies(pb.ListPoliciesRequest(page_size=2, page_token=token))
        assert len(page.policies) <= 2
        seen += [p.version for p in page.policies]
        if not (token := page.next_page_token):
            break
    assert seen == sorted(set(seen), reverse=True)
    assert {0, *new} <= set(seen)
    for bad, field in (({"page_token": "x"}, "page_token"), ({"page_size": 1001}, "page_size")):
        assert refusal(lambda: stub.ListPolicies(pb.ListPoliciesRequest(**bad))).field == field  # noqa: B023


@pytest.mark.parametrize("call", ["GetPolicy", "ActivatePolicy", "DeletePolicy"])
def test_versions_out_of_range(call: str, stub: Any) -> None:
    request = {"GetPolicy": pb.GetPolicyRequest, "ActivatePolicy": pb.ActivatePolicyRequest}.get(
        call, pb.DeletePolicyRequest
    )
    error = refusal(lambda: getattr(stub, call)(request(version=1 << 63)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "version")
    error = refusal(lambda: getattr(stub, call)(request(version=1 << 60)))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "POLICY_UNAVAILABLE")
    error = refusal(lambda: stub.ActivatePolicy(pb.ActivatePolicyRequest(version=0, mode=9)))  # type: ignore[arg-type]
    assert error.field == "mode"


# -- several servers, restarts


@pytest.mark.slow
def test_servers_that_share_a_store_converge(checkpoints: dict[str, Path], tmp_path: Path, pipe: Any) -> None:
    module = add_lora(pipe, seed=1)
    store = {"policy_store": str(tmp_path / "store")}
    model = checkpoints[FAST_FAMILY]
    with (
        running_server(model, **store) as a,
        running_server(model, **store) as b,
        RolloutClient(a.target) as on_a,
        RolloutClient(b.target) as on_b,
    ):
        pushed = on_a.push_policy(module, 1)
        trajectory = generate(on_b, policy_exactly=1)  # at once
        assert_replays(pipe, trajectory)
        deadline = time.monotonic() + 10
        while on_b.status().policy_version != 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert on_b.get_policy(1).fingerprint == pushed.fingerprint == local_fingerprint(module)
        assert generate(on_b).policy_versions.unique().tolist() == [1]
        with running_server(model, **store) as late, RolloutClient(late.target) as on_late:
            assert on_late.status().policy_version == 1
            assert on_late.get_policy(1).fingerprint == pushed.fingerprint
            # Two uploads of one version, and two activations, at once: one wins, the other is told.
            files = []
            for seed in (2, 3):
                randomise_lora(module, seed)
                files.append({k: v.clone() for k, v in get_peft_model_state_dict(module).items()})
            settings = LoraSettings(4, 8)
            outcomes = at_once(
                lambda: on_a.push_policy(files[0], 2, lora=settings, activate=False),
                lambda: on_b.push_policy(files[1], 2, lora=settings, activate=False),
            )
            assert sorted(type(o).__name__ for o in outcomes) == ["PolicyConflictError", "PolicyVersion"]
            winner = next(o for o in outcomes if isinstance(o, pb.PolicyVersion))
            assert {c.get_policy(2).sha256 for c in (on_a, on_b, on_late)} == {winner.sha256}
            outcomes = at_once(
                lambda: on_a.activate_policy(2, expected_current_version=1),
                lambda: on_b.activate_policy(0, expected_current_version=1),
            )
            assert sorted(type(o).__name__ for o in outcomes) == ["PolicyConflictError", "PolicyVersion"]
            current = next(o for o in outcomes if isinstance(o, pb.PolicyVersion)).version
            deadline = time.monotonic() + 10
            clients = (on_a, on_b, on_late)
            while {c.status().policy_version for c in clients} != {current} and time.monotonic() < deadline:
                time.sleep(0.05)
            assert {c.status().policy_version for c in clients} == {current}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each of the calls returns or raises."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RolloutError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_an_engine_that_was_killed_comes_back_with_the_current_version(
    kind: str, server: RunningServer, client: RolloutClient, pipe: Any, one: int
) -> None:
    module = add_lora(pipe, seed=1) if kind == "lora" else pipe.transformer
    if kind == "full":
        perturb(module, seed=1)
    pushed = client.push_policy(module, one)
    pid = server.server.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with grpc.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for serving in (health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING):
            deadline = time.monotonic() + 60
            while health.Check(health_pb2.HealthCheckRequest()).status != serving and time.monotonic() < deadline:
                time.sleep(0.01)
            assert health.Check(health_pb2.HealthCheckRequest()).status == serving
    assert client.get_policy(one).fingerprint == pushed.fingerprint
    trajectory = generate(client)
    assert trajectory.policy_versions.unique().tolist() == [one]
    assert_replays(pipe, trajectory)


def test_what_was_pushed_is_what_is_stored(server: RunningServer, client: RolloutClient, pipe: Any, one: int) -> None:
    state = perturb(pipe.transformer, seed=1)
    client.push_policy(state, one)
    (file,) = Path(server.server.config.policy_store or "").rglob(f"{one:020d}/*.safetensors")
    stored = parse_file(file.read_bytes())
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in state)


# -- under load


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("mode", MODES)
def test_swaps_under_load(mode: str, kind: str, client: RolloutClient, load_family: Any) -> None:
    """Eight streams while a version is activated every second: none breaks but by an abort, and every step replays
    under the version that it names.
    """
    pipes: dict[int, Any] = {}
    for _ in range(3):
        number, pipe = next(VERSIONS), load_family(FAST_FAMILY)
        if kind == "lora":
            add_lora(pipe, seed=number)
        else:
            perturb(pipe.transformer, seed=number)
        client.push_policy(pipe.transformer, number, activate=False)
        pipes[number] = pipe
    pipes[0] = load_family(FAST_FAMILY)
    stop = time.monotonic() + SWAP_SECONDS
    trajectories: list[Trajectory] = []
    aborted: list[RolloutError] = []

    def stream(worker: int) -> None:
        for attempt in itertools.count():
            if time.monotonic() > stop:
                return
            try:
                trajectories.append(generate(client, num_steps=20, samples_per_prompt=1, seed=worker * 1000 + attempt))
            except PolicyActivatedError as error:
                aborted.append(error)

    def activate() -> None:
        for number in itertools.cycle(pipes):
            if time.monotonic() > stop:
                return
            client.activate_policy(number, mode=mode)
            time.sleep(1)

    with ThreadPoolExecutor(9) as pool:
        for future in [pool.submit(activate), *(pool.submit(stream, worker) for worker in range(8))]:
            future.result(SWAP_SECONDS + 120)
    assert bool(aborted) == (mode == "abort")
    assert {v for t in trajectories for v in t.policy_versions.unique().tolist()} == set(pipes)
    switched = [t for t in trajectories if len(t.policy_versions.unique()) > 1]
    assert bool(switched) == (mode == "next_step")
    for trajectory in [*switched[:20], *trajectories[:: max(1, len(trajectories) // 40)]]:
        for number in trajectory.policy_versions.unique().tolist():
            steps = [k for k in trajectory.stochastic_steps if int(trajectory.policy_versions[0, k]) == number]
            for step in replay(pipes[number], trajectory, steps=steps, grad=False):
                column = trajectory.stochastic_steps.index(step.step_index)
                # Merged with other streams, rows round differently; a mixture of versions differs by far more.
                torch.testing.assert_close(step.log_prob, trajectory.log_probs[:, column], rtol=0, atol=2e-5)
