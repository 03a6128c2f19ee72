"""Pushing policies: what is sent, resumption, and the commands. Against a servicer that breaks where a test says."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pytest
import torch
import xxhash
from diffusion_rollout.v1 import policy_pb2 as pb
from diffusion_rollout.v1 import policy_pb2_grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load, save_file
from torch import Tensor, nn

from trainer_client import (
    AsyncRolloutClient,
    DeadlineExceededError,
    IntegrityError,
    InvalidRequestError,
    LoraSettings,
    PolicyActivatedError,
    PolicyBusyError,
    PolicyConflictError,
    PolicyUnavailableError,
    RolloutClient,
    UnavailableError,
    cli,
    local_fingerprint,
)
from trainer_client import policy as policy_module
from trainer_client.errors import from_rpc_error

UNAVAILABLE, ABORTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED


@dataclass
class Stored:
    header: pb.PolicyHeader
    data: bytearray = field(default_factory=bytearray)
    state: pb.PolicyState = pb.POLICY_STATE_UPLOADING


@dataclass
class Faults:
    """What goes wrong, and when; each happens once unless it says otherwise."""

    cuts: list[int] = field(default_factory=list)
    """Uploads end when this many bytes are stored, in order."""
    cut_code: grpc.StatusCode = UNAVAILABLE
    before: list[tuple[str, grpc.StatusCode, str]] = field(default_factory=list)
    """(method, code, reason) of the next calls of a method, before they do anything."""
    after: list[tuple[str, grpc.StatusCode, str]] = field(default_factory=list)
    """As before, when they have done everything."""
    always: grpc.StatusCode | None = None
    """Of every upload."""
    hang: bool = False
    """Uploads never end."""


class Policies(policy_pb2_grpc.PolicyServiceServicer):
    """The protocol in memory. Offsets, sizes and digests are checked as a server must."""

    def __init__(self) -> None:
        self.versions: dict[int, Stored] = {}
        self.faults = Faults()
        self.current = 0
        self.calls: list[str] = []
        self.chunks: list[tuple[int, int]] = []
        """(offset, size) as received."""
        self.activations: list[pb.ActivatePolicyRequest] = []

    async def UploadPolicy(self, messages: AsyncIterator[pb.UploadPolicyRequest], context: Any) -> Any:
        await self._begin("UploadPolicy", context)
        header = (await anext(aiter(messages))).header
        if self.faults.always:
            await fail(context, self.faults.always, "")
        if self.faults.hang:
            await asyncio.sleep(60)
        stored = self.versions.get(header.version)
        if stored is not None and stored.state != pb.POLICY_STATE_UPLOADING:
            if stored.header != header:
                await fail(context, grpc.StatusCode.ALREADY_EXISTS, "POLICY_CONFLICT")
            return pb.UploadPolicyResponse(policy=self._describe(header.version))
        if stored is None or stored.header != header:
            stored = self.versions[header.version] = Stored(header)
        async for message in messages:
            chunk = message.chunk
            if chunk.offset != len(stored.data):
                await fail(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "chunk.offset")
            assert google_crc32c.value(chunk.data) == chunk.crc32c
            self.chunks.append((chunk.offset, len(chunk.data)))
            cut = self.faults.cuts[0] if self.faults.cuts else None
            if cut is not None and len(stored.data) + len(chunk.data) >= cut:
                stored.data += chunk.data[: cut - len(stored.data)]
                self.faults.cuts.pop(0)
                await fail(context, self.faults.cut_code, "")
            stored.data += chunk.data
        if len(stored.data) != header.size_bytes:
            await fail(context, grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH")
        if hashlib.sha256(stored.data).digest() != header.sha256:
            del self.versions[header.version]
            await fail(context, grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH")
        stored.state = pb.POLICY_STATE_READY
        await self._end("UploadPolicy", context)
        return pb.UploadPolicyResponse(policy=self._describe(header.version))

    async def ActivatePolicy(self, request: pb.ActivatePolicyRequest, context: Any) -> Any:
        await self._begin("ActivatePolicy", context)
        if request.HasField("expected_current_version") and request.expected_current_version != self.current:
            await fail(context, grpc.StatusCode.FAILED_PRECONDITION, "POLICY_CONFLICT", current_version=self.current)
        self.activations.append(request)
        previous, self.current = self.current, request.version
        await self._end("ActivatePolicy", context)
        return pb.ActivatePolicyResponse(previous_version=previous, policy=self._describe(request.version))

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Any) -> Any:
        await self._begin("GetPolicy", context)
        if request.version not in self.versions:
            await fail(context, grpc.StatusCode.FAILED_PRECONDITION, "POLICY_UNAVAILABLE")
        return pb.GetPolicyResponse(policy=self._describe(request.version))

    async def ListPolicies(self, request: pb.ListPoliciesRequest, context: Any) -> Any:
        await self._begin("ListPolicies", context)
        left = [n for n in sorted(self.versions, reverse=True) if n < int(request.page_token or sys.maxsize)]
        token = str(left[1]) if len(left) > 2 else ""
        return pb.ListPoliciesResponse(policies=[self._describe(n) for n in left[:2]], next_page_token=token)

    async def DeletePolicy(self, request: pb.DeletePolicyRequest, context: Any) -> Any:
        await self._begin("DeletePolicy", context)
        if request.version == self.current:
            await fail(context, grpc.StatusCode.FAILED_PRECONDITION, "POLICY_CONFLICT", current_version=self.current)
        del self.versions[request.version]
        return pb.DeletePolicyResponse()

    async def _begin(self, method: str, context: Any) -> None:
        self.calls.append(method)
        await self._fault(self.faults.before, method, context)

    async def _end(self, method: str, context: Any) -> None:
        await self._fault(self.faults.after, method, context)

    async def _fault(self, faults: list[tuple[str, grpc.StatusCode, str]], method: str, context: Any) -> None:
        if faults and faults[0][0] == method:
            _, code, reason = faults.pop(0)
            await fail(context, code, reason)

    def _describe(self, version: int) -> pb.PolicyVersion:
        stored = self.versions[version]
        return pb.PolicyVersion(
            version=version,
            kind=stored.header.kind,
            state=pb.POLICY_STATE_CURRENT if version == self.current else stored.state,
            size_bytes=stored.header.size_bytes,
            committed_bytes=len(stored.data),
            sha256=stored.header.sha256,
            fingerprint=0xF00D + version,
        )


async def fail(context: Any, code: grpc.StatusCode, reason: str, field: str = "", **metadata: object) -> None:
    details: list[Any] = []
    if reason:
        facts = {name: str(value) for name, value in metadata.items()}
        details.append(error_details_pb2.ErrorInfo(reason=reason, domain="test", metadata=facts))
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = [any_pb2.Any() for _ in details]
    for wrapper, detail in zip(packed, details, strict=True):
        wrapper.Pack(detail)
    status = status_pb2.Status(code=code.value[0], details=packed)
    trailer = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, f"{code.name} as the test says", trailing_metadata=trailer)


@contextmanager
def loop_in_thread() -> Iterator[Callable[[Any], Any]]:
    """A function that runs coroutines on a loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass(frozen=True)
class Serving:
    policies: Policies
    port: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def serving_once() -> Iterator[Serving]:
    policies = Policies()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(policies, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    with loop_in_thread() as run:
        server, port = run(start())
        yield Serving(policies, port)
        run(server.stop(0))


@pytest.fixture
def serving(serving_once: Serving, monkeypatch: pytest.MonkeyPatch) -> Serving:
    serving_once.policies.__init__()
    monkeypatch.setattr(policy_module, "FIRST_PAUSE_SECONDS", 0.002)
    return serving_once


@pytest.fixture(params=["sync", "async"])
def push(request: pytest.FixtureRequest, serving: Serving) -> Callable[..., pb.PolicyVersion]:
    """``push_policy`` of both clients."""

    def sync(*arguments: Any, target: str = serving.target, **settings: Any) -> pb.PolicyVersion:
        with RolloutClient(target) as client:
            return client.push_policy(*arguments, **settings)

    def by_async(*arguments: Any, target: str = serving.target, **settings: Any) -> pb.PolicyVersion:
        async def run() -> pb.PolicyVersion:
            async with AsyncRolloutClient(target) as client:
                return await client.push_policy(*arguments, **settings)

        return asyncio.run(run())

    return sync if request.param == "sync" else by_async


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 4)
        self.block = nn.ModuleDict({"to_q": nn.Linear(4, 4, bias=False), "to_k": nn.Linear(4, 4, bias=False)})
        self.conv = nn.Conv2d(2, 3, 3)
        self.register_buffer("steps", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return self.block["to_q"](x) + self.block["to_k"](x)


def lora_config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["to_q", "to_k"]} | settings)  # type: ignore[arg-type]


def adapted(config: LoraConfig | None = None, name: str = "default") -> Denoiser:
    module = Denoiser()
    inject_adapter_in_model(config or lora_config(), module, name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def stored(serving: Serving, version: int = 1) -> dict[str, Tensor]:
    found = serving.policies.versions[version]
    assert found.state == pb.POLICY_STATE_READY
    return load(bytes(found.data))


def assert_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor.detach().cpu()), name


SETTINGS = LoraSettings(3, 6.0)


def lora_state() -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in get_peft_model_state_dict(adapted(), adapter_name="default").items()}


# -- what is sent


def test_all_weights_of_a_module(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    module = Denoiser()
    pushed = push(module, 1)
    assert_same(stored(serving), module.state_dict())
    header = serving.policies.versions[1].header
    assert header.kind == pb.POLICY_KIND_FULL
    assert not header.HasField("lora_rank")
    assert not header.HasField("lora_alpha")
    assert pushed.state == pb.POLICY_STATE_CURRENT
    assert pushed.sha256 == header.sha256 == hashlib.sha256(serving.policies.versions[1].data).digest()
    assert pushed.fingerprint == 0xF00D + 1
    assert serving.policies.activations == [pb.ActivatePolicyRequest(version=1, mode=pb.ACTIVATION_MODE_NEW_ROLLOUTS)]


def test_the_adapter_of_an_injected_module(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    config = lora_config(rank_pattern={"to_k": 2}, alpha_pattern={"to_k": 5.0})
    module = adapted(config)
    push(module, 1)
    assert_same(stored(serving), get_peft_model_state_dict(module, adapter_name="default"))
    header = serving.policies.versions[1].header
    assert header.kind == pb.POLICY_KIND_LORA
    assert (header.lora_rank, header.lora_alpha) == (3, 6.0)
    assert dict(header.rank_pattern) == {"to_k": 2}
    assert dict(header.alpha_pattern) == {"to_k": 5.0}


def test_the_adapter_of_a_peft_model_and_of_wrappers(serving: Serving) -> None:
    wrapped = get_peft_model(Denoiser(), lora_config())  # type: ignore[arg-type]
    with RolloutClient(serving.target) as client:
        client.push_policy(wrapped, 1)
        client.push_policy(torch.compile(adapted(), backend="eager"), 2)  # type: ignore[arg-type]
        client.push_policy(torch.compile(Denoiser(), backend="eager"), 3)  # type: ignore[arg-type]
    assert set(stored(serving)) == {
        f"base_model.model.block.{name}.lora_{letter}.weight" for name in ("to_q", "to_k") for letter in "AB"
    }
    assert set(stored(serving, 2)) == {f"block.{n}.lora_{letter}.weight" for n in ("to_q", "to_k") for letter in "AB"}
    assert set(stored(serving, 3)) == set(Denoiser().state_dict())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_the_active_adapter_of_several(serving: Serving) -> None:
    module = adapted(name="first")
    inject_adapter_in_model(lora_config(r=2, lora_alpha=1), module, "second")
    with RolloutClient(serving.target) as client:
        for version, name, rank in ((1, "first", 3), (2, "second", 2)):
            for layer in module.block.values():
                layer.set_adapter([name])  # type: ignore[operator]
            client.push_policy(module, version)
            assert serving.policies.versions[version].header.lora_rank == rank
            assert_same(stored(serving, version), get_peft_model_state_dict(module, adapter_name=name))
        for layer in module.block.values():
            layer.set_adapter(["first", "second"])  # type: ignore[operator]
        with pytest.raises(ValueError, match="2 of them are active"):
            client.push_policy(module, 3)


@pytest.mark.parametrize("lora", [SETTINGS, lora_config(), LoraSettings(3)])
def test_a_lora_state_dict(serving: Serving, push: Callable[..., pb.PolicyVersion], lora: Any) -> None:
    state = lora_state()
    push(state, 1, lora=lora)
    assert_same(stored(serving), state)
    header = serving.policies.versions[1].header
    assert header.lora_rank == 3
    assert header.HasField("lora_alpha") == (lora != LoraSettings(3))
    assert header.lora_alpha in (0.0, 6.0)


def test_files_and_adapter_directories(serving: Serving, push: Callable[..., pb.PolicyVersion], tmp_path: Path) -> None:
    state = lora_state()
    save_file(state, tmp_path / "lora.safetensors")
    push(tmp_path / "lora.safetensors", 1, lora=SETTINGS)
    assert bytes(serving.policies.versions[1].data) == (tmp_path / "lora.safetensors").read_bytes()
    module = get_peft_model(Denoiser(), lora_config(alpha_pattern={"block.to_q": 1.5}))  # type: ignore[arg-type]
    module.save_pretrained(str(tmp_path / "adapter"))
    push(str(tmp_path / "adapter"), 2)
    header = serving.policies.versions[2].header
    assert (header.lora_rank, header.lora_alpha, dict(header.alpha_pattern)) == (3, 6.0, {"block.to_q": 1.5})
    assert bytes(serving.policies.versions[2].data) == (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    save_file(Denoiser().state_dict(), tmp_path / "full.safetensors")
    push(tmp_path / "full.safetensors", 3)
    assert serving.policies.versions[3].header.kind == pb.POLICY_KIND_FULL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_layout_of_memory(serving: Serving, push: Callable[..., pb.PolicyVersion], dtype: torch.dtype) -> None:
    base = torch.randn(4, 6).to(dtype)
    image = torch.randn(2, 3, 4, 5).to(dtype)
    tensors = {
        "whole": base,
        "again": base,
        "transposed": base.T,
        "rows": base[1:3],
        "columns": base[:, ::2],
        "expanded": torch.ones(1, 1).to(dtype).expand(3, 2),
        "channels_last": image.to(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.5).to(dtype),
        "empty": torch.empty(0, 3).to(dtype),
        "also_empty": torch.empty(2, 0).to(dtype),
        "parameter": nn.Parameter(base + 1),
        "indices": torch.arange(3),
    }
    push(tensors, 1)
    assert_same(stored(serving), tensors)


def test_tied_weights_are_sent_under_both_names(serving: Serving) -> None:
    module = Denoiser()
    module.block["to_k"].weight = module.block["to_q"].weight
    with RolloutClient(serving.target) as client:
        client.push_policy(module, 1)
    assert_same(stored(serving), module.state_dict())


def test_the_same_tensors_are_the_same_bytes() -> None:
    names = [f"layer.{n}" for n in range(40)]
    tensors = {name: torch.full((3, n + 1), float(n)) for n, name in enumerate(names)}
    with policy_module.PolicyFile.of(tensors) as a, policy_module.PolicyFile.of(dict(reversed(tensors.items()))) as b:
        assert (a.sha256, a.size_bytes) == (b.sha256, b.size_bytes)


def test_nothing_is_left_of_temporary_files(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RolloutClient(serving.target) as client:
        client.push_policy(Denoiser(), 1)
        with pytest.raises(ValueError, match="not a tensor"):
            client.push_policy({"a": 1}, 2)  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


# -- what is refused here


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl", ".PT"])
def test_pickles_are_refused_unread(suffix: str, tmp_path: Path) -> None:
    with RolloutClient("127.0.0.1:1") as client, pytest.raises(ValueError, match=r"save them as \.safetensors"):
        client.push_policy(tmp_path / f"missing{suffix}", 1)


def test_sources_that_cannot_be_sent(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors at all")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    save_file(lora_state(), tmp_path / "broken" / "adapter_model.safetensors")
    (tmp_path / "broken" / "adapter_config.json").write_text("[1, 2")
    save_file(lora_state(), tmp_path / "lora.safetensors")
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (tmp_path / "missing.safetensors", {}, FileNotFoundError, "no such file"),
        (tmp_path / "text.safetensors", {}, ValueError, "not a safetensors file"),
        (tmp_path / "empty", {}, ValueError, "adapter_model.safetensors"),
        (tmp_path / "broken", {}, ValueError, "not a LoRA's config"),
        (tmp_path / "lora.safetensors", {}, ValueError, "lora=LoraSettings"),
        (lora_state(), {}, ValueError, "lora=LoraSettings"),
        ({"a.lora.down.weight": torch.zeros(2, 2)}, {}, ValueError, "lora=LoraSettings"),
        ({"a": torch.zeros(2, device="meta")}, {}, ValueError, "meta"),
        ({"a": torch.zeros(2).to_sparse()}, {}, ValueError, "sparse"),
        ([torch.zeros(2)], {}, TypeError, "list cannot be pushed"),
        (lora_state(), {"lora": {"r": 3}}, TypeError, "dict has no rank"),
        (lora_state(), {"lora": lora_config(use_rslora=True)}, ValueError, "use_rslora"),
        (lora_state(), {"lora": lora_config(use_dora=True)}, ValueError, "use_dora"),
        (lora_state(), {"lora": lora_config(init_lora_weights="pissa")}, ValueError, "changes the base"),
        (lora_state(), {"lora": LoraSettings(-1)}, InvalidRequestError, "cannot hold"),
        (lora_state(), {"lora": LoraSettings(3, rank_pattern={"(": 1, "to_k": 2})}, ValueError, "not a pattern"),
        (adapted(lora_config(use_rslora=True)), {}, ValueError, "use_rslora"),
        (Denoiser(), {"mode": "soon"}, InvalidRequestError, "new_rollouts, next_step, abort"),
        (Denoiser(), {"expected_current_version": -1}, InvalidRequestError, "cannot hold"),
        (Denoiser(), {"expected_current_version": 1, "activate": False}, ValueError, "activate=True"),
        (Denoiser(), {"attempts": 0}, ValueError, "1 or more"),
        (Denoiser(), {"chunk_bytes": 0}, ValueError, "1 or more"),
    ]
    with RolloutClient("127.0.0.1:1") as client:
        for source, settings, kind, message in cases:
            with pytest.raises(kind, match=message):
                client.push_policy(source, 1, **settings)
        versions: list[Any] = [-1, 1 << 64, "one"]
        for version in versions:
            for call in (client.get_policy, client.delete_policy, client.activate_policy):
                with pytest.raises(InvalidRequestError):
                    call(version)


def test_a_scale_that_was_changed_is_refused(serving: Serving) -> None:
    module = adapted()
    module.block["to_q"].scale_layer(0.5)  # type: ignore[operator]
    with RolloutClient(serving.target) as client:
        with pytest.raises(ValueError, match=r"scale was set to 1\.0"):
            client.push_policy(module, 1)
        client.push_policy(module, 1, lora=LoraSettings(3, 3.0))
    assert serving.policies.versions[1].header.lora_alpha == 3.0


def test_patterns_whose_order_would_matter_are_refused(serving: Serving) -> None:
    names = {f"blocks.{n}.to_q.lora_{letter}.weight": torch.zeros(2, 2) for n in range(2) for letter in "AB"}
    with RolloutClient(serving.target) as client:
        with pytest.raises(ValueError, match=r"rank_pattern gives blocks\.1\.to_q different values"):
            client.push_policy(names, 1, lora=LoraSettings(2, rank_pattern={"blocks.1.to_q": 2, "to_q": 4}))
        client.push_policy(names, 1, lora=LoraSettings(2, rank_pattern={"blocks.1.to_q": 2, "to_q": 2}))
        client.push_policy(names, 2, lora=LoraSettings(2, rank_pattern={"blocks.1.to_q": 2, "blocks.0.to_q": 4}))


# -- resumption

TENSORS = {"weight": torch.arange(700, dtype=torch.float32)}


def whole_file() -> bytes:
    with policy_module.PolicyFile.of(TENSORS) as file:
        return file.chunk(0, file.size_bytes).data


def assert_nothing_was_resent(policies: Policies, data: bytes, cuts: list[int]) -> None:
    """Chunks are in order; each begins where the bytes that were stored by then ended."""
    left, end = list(cuts), 0
    for offset, size in policies.chunks:
        assert offset == end
        end += size
        if left and end >= left[0]:
            end = left.pop(0)
    assert not left
    assert end == len(data)


def test_a_cut_anywhere_is_resumed(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    data = whole_file()
    size = len(data)
    positions = sorted({0, 1, 2, 255, 256, 257, 511, 512, *range(100, size, 371), size - 1, size})
    for version, position in enumerate(positions, 1):
        serving.policies.__init__()
        serving.policies.faults.cuts = [position]
        pushed = push(TENSORS, version, chunk_bytes=256)
        assert bytes(serving.policies.versions[version].data) == data, position
        assert pushed.state == pb.POLICY_STATE_CURRENT
        assert_nothing_was_resent(serving.policies, data, [position])
        assert serving.policies.calls.count("UploadPolicy") == 2


@pytest.mark.parametrize("code", [UNAVAILABLE, ABORTED, grpc.StatusCode.CANCELLED])
def test_many_cuts_in_a_row(serving: Serving, push: Callable[..., pb.PolicyVersion], code: grpc.StatusCode) -> None:
    data = whole_file()
    cuts = [1, 100, 1500, 2801]
    serving.policies.faults = Faults(cuts=list(cuts), cut_code=code)
    push(TENSORS, 1, chunk_bytes=300, attempts=5)
    assert bytes(serving.policies.versions[1].data) == data
    assert_nothing_was_resent(serving.policies, data, cuts)


@pytest.mark.parametrize("limit", [0, 500, 2000, 20_000, 500_000])
def test_a_connection_that_breaks(
    serving: Serving, push: Callable[..., pb.PolicyVersion], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real socket, closed by a proxy after so many bytes of the first connection."""
    if not limit:  # gRPC itself waits for a second after a connection that it could not make
        monkeypatch.setattr(policy_module, "FIRST_PAUSE_SECONDS", 0.2)
    tensors = {"weight": torch.randn(1 << 18)}
    with loop_in_thread() as run, breaking_proxy(run, serving.port, limit) as port:
        push(tensors, 1, chunk_bytes=10_000, target=f"127.0.0.1:{port}")
    assert_same(stored(serving), tensors)
    ends = list(itertools.accumulate(size for _, size in serving.policies.chunks))
    assert [offset for offset, _ in serving.policies.chunks] == [0, *ends[:-1]]


@contextmanager
def breaking_proxy(run: Callable[[Any], Any], port: int, limit: int) -> Iterator[int]:
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        left = limit if connections == 1 else sys.maxsize
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)

        async def back() -> None:
            while data := await inner_reader.read(1 << 16):
                writer.write(data)

        task = asyncio.create_task(back())
        while left > 0 and (data := await reader.read(min(left, 1 << 16))):
            left -= len(data)
            inner_writer.write(data)
            await inner_writer.drain()
        task.cancel()
        for end in (writer, inner_writer):
            end.close()

    server = run(asyncio.start_server(connected, "127.0.0.1", 0))

    async def stop() -> None:
        server.close()
        await asyncio.sleep(0.05)  # connections notice that the client has gone

    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        run(stop())


def test_a_later_push_continues(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    data = whole_file()
    serving.policies.faults.cuts = [1000]
    with pytest.raises(UnavailableError):
        push(TENSORS, 1, chunk_bytes=256, attempts=1)
    assert len(serving.policies.versions[1].data) == 1000
    push(TENSORS, 1, chunk_bytes=256, attempts=1)
    assert_nothing_was_resent(serving.policies, data, [1000])


def test_what_another_push_left_is_not_continued(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    serving.policies.faults.cuts = [1000]
    with pytest.raises(UnavailableError):
        push({"weight": torch.zeros(700)}, 1, attempts=1)
    push(TENSORS, 1, attempts=1)
    assert_same(stored(serving), TENSORS)


@pytest.mark.parametrize("position", [1000, 0])
def test_other_settings_are_not_continued_either(
    serving: Serving, push: Callable[..., pb.PolicyVersion], position: int
) -> None:
    """The server begins anew with another header, which the client learns from the offset, or the missing bytes."""
    state = lora_state()
    with policy_module.PolicyFile.of(state, SETTINGS) as file:
        position = position if position < file.size_bytes and position else file.size_bytes
    serving.policies.faults.cuts = [position]
    with pytest.raises(UnavailableError):
        push(state, 1, lora=SETTINGS, attempts=1)
    push(state, 1, lora=LoraSettings(3, 1.0), attempts=2)
    assert serving.policies.versions[1].header.lora_alpha == 1.0
    assert_same(stored(serving), state)


def test_bytes_left_behind_that_are_wrong(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    """A digest that fails over what an earlier push left is tried once more from the beginning."""
    serving.policies.faults.cuts = [1000]
    with pytest.raises(UnavailableError):
        push(TENSORS, 1, attempts=1)
    serving.policies.versions[1].data[500] ^= 1
    push(TENSORS, 1)
    assert_same(stored(serving), TENSORS)


def test_a_push_again_sends_nothing(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    for version, settings in ((1, {}), (2, {"lora": SETTINGS})):
        tensors = lora_state() if settings else TENSORS
        first = push(tensors, version, **settings)
        sent, activations = list(serving.policies.chunks), len(serving.policies.activations)
        assert push(tensors, version, **settings) == first
        assert push(tensors, version, expected_current_version=77, **settings) == first
        assert (serving.policies.chunks, len(serving.policies.activations)) == (sent, activations)
    assert serving.policies.calls.count("UploadPolicy") == 4  # of a LoRA the server compares rank and scale


def test_a_push_again_activates_what_was_not(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    assert push(TENSORS, 1, activate=False).state == pb.POLICY_STATE_READY
    assert serving.policies.current == 0
    assert push(TENSORS, 1, mode="next_step", expected_current_version=0).state == pb.POLICY_STATE_CURRENT
    assert serving.policies.activations == [
        pb.ActivatePolicyRequest(version=1, mode=pb.ACTIVATION_MODE_NEXT_STEP, expected_current_version=0)
    ]


def test_other_content_under_the_same_version(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    state = lora_state()
    push(state, 1, lora=SETTINGS)
    for tensors, lora in ((TENSORS, None), (state, LoraSettings(3, 7.0))):
        with pytest.raises(PolicyConflictError) as caught:
            push(tensors, 1, lora=lora)
        assert not isinstance(caught.value, PolicyBusyError)
        assert caught.value.reason == "POLICY_CONFLICT"
    assert serving.policies.versions[1].header.lora_alpha == 6.0


def test_lost_answers(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    """The server did what was asked, and the client did not hear of it."""
    serving.policies.faults = Faults(
        before=[("GetPolicy", UNAVAILABLE, "")],
        after=[("UploadPolicy", UNAVAILABLE, ""), ("ActivatePolicy", UNAVAILABLE, "ENGINE_RESTARTED")],
    )
    assert push(TENSORS, 1, expected_current_version=0).state == pb.POLICY_STATE_CURRENT
    assert serving.policies.calls.count("UploadPolicy") == 1
    assert len(serving.policies.activations) == 1


def test_a_lost_answer_about_settings_is_asked_for_again(
    serving: Serving, push: Callable[..., pb.PolicyVersion]
) -> None:
    state = lora_state()
    push(state, 1, lora=SETTINGS)
    serving.policies.faults.before = [("UploadPolicy", UNAVAILABLE, "")]
    with pytest.raises(PolicyConflictError):
        push(state, 1, lora=LoraSettings(3, 7.0))


def test_giving_up_with_the_real_error(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    for code, kind in ((UNAVAILABLE, UnavailableError), (ABORTED, PolicyBusyError)):
        serving.policies.__init__()
        serving.policies.faults.always = code
        with pytest.raises(kind, match=f"{code.name} as the test says"):
            push(TENSORS, 1, attempts=3)
        assert serving.policies.calls == ["GetPolicy", "UploadPolicy"] * 3
    with pytest.raises(UnavailableError):
        push(TENSORS, 1, attempts=2, target=f"127.0.0.1:{free_port()}")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", InvalidRequestError),
        (grpc.StatusCode.ALREADY_EXISTS, "POLICY_CONFLICT", PolicyConflictError),
        (grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH", IntegrityError),
        (grpc.StatusCode.FAILED_PRECONDITION, "POLICY_UNAVAILABLE", PolicyUnavailableError),
    ],
)
def test_errors_that_another_try_does_not_help(
    serving: Serving, push: Callable[..., pb.PolicyVersion], code: grpc.StatusCode, reason: str, kind: type[Exception]
) -> None:
    serving.policies.faults.before = [("UploadPolicy", code, reason)]
    with pytest.raises(kind, match="as the test says"):
        push(TENSORS, 1)
    assert serving.policies.calls == ["GetPolicy", "UploadPolicy"]


def test_the_timeout_is_of_everything(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    serving.policies.faults.hang = True
    with pytest.raises(DeadlineExceededError):
        push(TENSORS, 1, timeout=0.3)
    serving.policies.faults = Faults(always=UNAVAILABLE)
    with pytest.raises(DeadlineExceededError, match="before that: UNAVAILABLE as the test says"):
        push(TENSORS, 1, timeout=0.3, attempts=1000)
    with pytest.raises(DeadlineExceededError):
        push(TENSORS, 1, timeout=0)


def test_another_version_is_current_than_was_expected(serving: Serving, push: Callable[..., pb.PolicyVersion]) -> None:
    with pytest.raises(PolicyConflictError) as caught:
        push(TENSORS, 1, expected_current_version=5)
    assert caught.value.metadata == {"current_version": "0"}
    assert serving.policies.versions[1].state == pb.POLICY_STATE_READY


def test_a_file_that_changes_meanwhile(
    serving: Serving, push: Callable[..., pb.PolicyVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "full.safetensors"
    save_file(TENSORS, path)
    original = policy_module.PolicyFile.header

    def shorten(self: policy_module.PolicyFile, version: int) -> pb.PolicyHeader:
        path.write_bytes(path.read_bytes()[:1500])
        return original(self, version)

    monkeypatch.setattr(policy_module.PolicyFile, "header", shorten)
    with pytest.raises(OSError, match="it was changed"):
        push(path, 1, chunk_bytes=256)


def test_an_async_push_can_be_cancelled(serving: Serving) -> None:
    serving.policies.faults.hang = True

    async def run() -> None:
        async with AsyncRolloutClient(serving.target) as client:
            task = asyncio.create_task(client.push_policy(TENSORS, 1))
            while "UploadPolicy" not in serving.policies.calls:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


# -- the other calls


def test_listing_activating_and_deleting(serving: Serving) -> None:
    with RolloutClient(serving.target) as client:
        assert client.list_policies() == []
        with pytest.raises(PolicyUnavailableError):
            client.get_policy(1)
        pushed = [client.push_policy(TENSORS, version) for version in range(1, 6)]
        listed = client.list_policies()
        assert [policy.version for policy in listed] == [5, 4, 3, 2, 1]  # on three pages
        assert listed[0] == pushed[-1]
        assert client.activate_policy(3, mode="next_step").state == pb.POLICY_STATE_CURRENT
        client.delete_policy(1)
        with pytest.raises(PolicyConflictError):
            client.delete_policy(3)

    async def run() -> list[pb.PolicyVersion]:
        async with AsyncRolloutClient(serving.target) as client:
            assert (await client.activate_policy(4, mode="abort", expected_current_version=3)).version == 4
            with pytest.raises(PolicyConflictError):
                await client.activate_policy(5, expected_current_version=3)
            assert (await client.get_policy(2)).state == pb.POLICY_STATE_READY
            await client.delete_policy(3)
            return await client.list_policies()

    assert [policy.version for policy in asyncio.run(run())] == [5, 4, 2]
    assert serving.policies.activations[-1].mode == pb.ACTIVATION_MODE_ABORT


def test_errors_carry_the_names_at_fault() -> None:
    info = error_details_pb2.ErrorInfo(
        reason="INVALID_FIELD", metadata={"missing": "a.weight\nb.weight", "missing_count": "2"}
    )
    error = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, info))
    assert isinstance(error, InvalidRequestError)
    assert error.metadata == {"missing": "a.weight\nb.weight", "missing_count": "2"}
    activated = from_rpc_error(rpc_error(ABORTED, error_details_pb2.ErrorInfo(reason="POLICY_ACTIVATED")))
    assert isinstance(activated, PolicyActivatedError)
    assert activated.metadata == {}


def rpc_error(code: grpc.StatusCode, info: error_details_pb2.ErrorInfo) -> grpc.RpcError:
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], details=[detail])
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, "message")


# -- the fingerprint


def independent(tensors: dict[str, Tensor]) -> int:
    """The protocol's words, with bytes out of numpy."""
    text = b""
    for name, tensor in sorted((name.encode(), tensor) for name, tensor in tensors.items()):
        bits = tensor.detach().clone(memory_format=torch.contiguous_format)
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        text += name + b"\0" + bits.numpy().astype(bits.numpy().dtype.newbyteorder("<")).tobytes()
    return xxhash.xxh64_intdigest(text)


def test_fingerprint_of_all_weights() -> None:
    module = Denoiser()
    module.conv = module.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = {f"transformer.{name}": tensor for name, tensor in module.state_dict().items()}
    assert local_fingerprint(module) == independent(expected)
    assert local_fingerprint(module.state_dict()) == independent(expected)
    assert local_fingerprint(expected) == independent(expected)
    unet = {name.replace("transformer.", "unet.", 1): tensor for name, tensor in expected.items()}
    assert local_fingerprint(module, "unet") == independent(unet)
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in expected.items()}
    assert local_fingerprint(module, dtype=torch.bfloat16) == independent(half) == local_fingerprint(half)
    with torch.no_grad():
        module.proj.bias[0] += 1e-6
    assert local_fingerprint(module) != independent(unet)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_of_a_lora_under_every_name(dtype: torch.dtype) -> None:
    module = adapted().to(dtype)
    state = get_peft_model_state_dict(module, adapter_name="default")
    expected = independent({f"transformer.{name}": tensor for name, tensor in state.items()})
    assert local_fingerprint(module) == expected
    for old, new in (
        ("block.", "base_model.model.block."),
        ("block.", "transformer.block."),
        ("block.", "base_model.model.transformer.block."),
        ("block.", "transformer.base_model.model.block."),
        (".weight", ".default.weight"),
    ):
        assert local_fingerprint({name.replace(old, new): tensor for name, tensor in state.items()}) == expected
    older = {n.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): t for n, t in state.items()}
    assert local_fingerprint(older) == expected
    twice = state | {f"transformer.{name}": tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match="another tensor"):
        local_fingerprint(twice)


def test_fingerprint_of_several_denoisers() -> None:
    tensors = {f"{part}.proj.weight": torch.randn(2, 2) for part in ("transformer", "transformer_2")}
    assert local_fingerprint(tensors, ("transformer", "transformer_2")) == independent(tensors)
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    assert local_fingerprint(prefixed, ("transformer", "transformer_2")) == independent(tensors)
    with pytest.raises(ValueError, match="of which component"):
        local_fingerprint({"proj.weight": torch.zeros(1)}, ("transformer", "transformer_2"))


def test_fingerprint_sorts_by_bytes() -> None:
    tensors = {name: torch.tensor([float(n)]) for n, name in enumerate(["a.b", "a_b", "a", "ä", "Z", "a.b.c"])}
    assert local_fingerprint(tensors) == independent({f"transformer.{name}": t for name, t in tensors.items()})


# -- commands


@pytest.fixture
def command(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `rollout policy ...`; returns (exit code, output, errors)."""
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    monkeypatch.setattr(cli, "_console", cli.Console(width=160, color_system=None))

    def run(*arguments: str, target: str = serving.target) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollout", "policy", *arguments, "--target", target])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = ended.value.code
        assert isinstance(code, int) or code is None
        return code or 0, captured.out, captured.err

    return run


def test_commands(serving: Serving, command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "full.safetensors")
    save_file(lora_state(), tmp_path / "lora.safetensors")
    code, out, err = command("push", str(tmp_path / "full.safetensors"), "--version", "1")
    assert code == 0, err
    assert "current" in out
    assert hashlib.sha256((tmp_path / "full.safetensors").read_bytes()).hexdigest() in out
    assert "policy 1" in err
    code, out, err = command(
        "push", str(tmp_path / "lora.safetensors"), "--version", "2", "--lora-rank", "3", "--lora-alpha", "6",
        "--no-activate",
    )  # fmt: skip
    assert code == 0, err
    assert "ready" in out
    header = serving.policies.versions[2].header
    assert (header.kind, header.lora_rank, header.lora_alpha) == (pb.POLICY_KIND_LORA, 3, 6.0)
    code, out, err = command("list")
    assert code == 0, err
    assert out.index(f"{0xF00D + 2:016x}") < out.index(f"{0xF00D + 1:016x}")
    code, out, err = command("activate", "2", "--mode", "next-step", "--expected-current", "1")
    assert code == 0, err
    assert "current" in out
    assert serving.policies.activations[-1] == pb.ActivatePolicyRequest(
        version=2, mode=pb.ACTIVATION_MODE_NEXT_STEP, expected_current_version=1
    )
    code, out, err = command("show", "2")
    assert code == 0, err
    assert "lora" in out
    assert command("delete", "1")[:2] == (0, "deleted policy version 1\n")
    assert set(serving.policies.versions) == {2}
    serving.policies.versions[3] = Stored(pb.PolicyHeader(version=3, kind=pb.POLICY_KIND_FULL, size_bytes=5000))
    serving.policies.versions[3].data += b"x" * 1200
    assert "1,200 of 5,000" in command("show", "3")[1]


def test_commands_fail_in_one_line(
    serving: Serving, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    save_file(lora_state(), tmp_path / "lora.safetensors")
    lora = str(tmp_path / "lora.safetensors")
    for arguments, message in (
        (("push", lora, "--version", "1"), "pass --lora-rank"),
        (("push", lora, "--version", "1", "--lora-alpha", "2"), "--lora-alpha: is of a LoRA"),
        (("push", str(tmp_path / "weights.pt"), "--version", "1"), "save them as .safetensors"),
        (("push", str(tmp_path / "missing.safetensors"), "--version", "1"), "no such file"),
        (("push", lora, "--version", "1", "--lora-rank", "3", "--mode", "soon"), "--mode: 'soon' is unknown"),
        (("push", lora, "--version", "1", "--lora-rank", "3", "--expected-current", "9"), "FAILED_PRECONDITION"),
        (("show", "7"), "FAILED_PRECONDITION"),
        (("activate", "7", "--mode", "x"), "--mode: 'x' is unknown"),
        (("delete", "0"), "FAILED_PRECONDITION"),
    ):
        code, _, err = command(*arguments)
        assert code in (1, 2), arguments
        assert err.splitlines()[-1].startswith("rollout: ")
        assert message in err, arguments
    code, _, err = command("list", target=f"127.0.0.1:{free_port()}")
    assert code == 1
    assert err.startswith("rollout: ")


def test_names_that_do_not_bind_are_shown(
    serving: Serving, command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Policies, method: str, context: Any) -> None:
        if method == "UploadPolicy":
            facts = {"missing": "a.weight\nb.weight", "missing_count": "23"}
            await fail(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "content", **facts)

    monkeypatch.setattr(Policies, "_begin", refuse)
    serving.policies.versions[1] = Stored(pb.PolicyHeader(version=1))
    save_file(TENSORS, tmp_path / "full.safetensors")
    code, _, err = command("push", str(tmp_path / "full.safetensors"), "--version", "1")
    assert code == 1
    assert "23 missing:\n  a.weight\n  b.weight\nrollout: " in err


def test_help_of_the_commands(command: Callable[..., tuple[int, str, str]]) -> None:
    for name in ("push", "list", "show", "activate", "delete"):
        code, out, _ = command(name, "--help")
        assert code == 0
        assert "--server" in out


def test_settings_from_a_config_file(tmp_path: Path) -> None:
    """adapter_config.json is data: only numbers and patterns are taken from it."""
    save_file(lora_state(), tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 9, "rank_pattern": {}, "use_rslora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with policy_module.PolicyFile.of(tmp_path) as file:
        assert file.lora == LoraSettings(3, 9)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    with pytest.raises(ValueError, match="use_rslora"):
        policy_module.PolicyFile.of(tmp_path)
    with policy_module.PolicyFile.of(tmp_path, LoraSettings(3, 9)) as file:
        assert file.lora == LoraSettings(3, 9)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LOHA"}))
    with pytest.raises(ValueError, match="LOHA"):
        policy_module.PolicyFile.of(tmp_path)
