"""PolicyService over the policy versions of one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import google_crc32c
import grpc
import structlog
from diffusion_rollout.v1 import policy_pb2 as pb
from diffusion_rollout.v1 import policy_pb2_grpc

from rollout_service.config import ServerConfig
from rollout_service.engine.client import EngineLostError
from rollout_service.policy.staging import (
    ChecksumError,
    StagedUpload,
    StagingError,
    TruncatedError,
    UploadBusyError,
    UploadHeader,
)
from rollout_service.policy.store import Mode, PolicyRecord, PolicyStoreError, VersionMissingError

from .errors import ServiceError, abort, draining, engine_restarted, invalid, over_limit
from .versions import BASE_VERSION, PolicyVersions

log = structlog.get_logger(__name__)
Answer = TypeVar("Answer")

_KINDS = {pb.POLICY_KIND_FULL: "full", pb.POLICY_KIND_LORA: "lora"}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_MODES: dict[int, Mode] = {
    pb.ACTIVATION_MODE_UNSPECIFIED: "new_rollouts",
    pb.ACTIVATION_MODE_NEW_ROLLOUTS: "new_rollouts",
    pb.ACTIVATION_MODE_NEXT_STEP: "next_step",
    pb.ACTIVATION_MODE_ABORT: "abort",
}
_MAX_VERSION = (1 << 63) - 1
_MAX_PATTERNS = 4096
_MAX_ALPHA = 1e9
_MAX_PAGE_SIZE = 1000
_DEFAULT_PAGE_SIZE = 100


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """Serves policy versions.

    Args:
        versions: the server's.
        config: limits.
    """

    def __init__(self, versions: PolicyVersions, config: ServerConfig) -> None:
        self._versions, self._config = versions, config
        self._draining = False

    def drain(self) -> None:
        """Admit nothing from now on."""
        self._draining = True

    async def UploadPolicy(
        self, request_iterator: AsyncIterator[pb.UploadPolicyRequest], context: grpc.aio.ServicerContext
    ) -> pb.UploadPolicyResponse:
        """See the protocol."""
        return await self._answer(context, lambda: self._upload(aiter(request_iterator)))

    async def ActivatePolicy(
        self, request: pb.ActivatePolicyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ActivatePolicyResponse:
        """See the protocol."""

        async def activate() -> pb.ActivatePolicyResponse:
            mode = _MODES.get(request.mode)
            if mode is None:
                raise invalid("mode", f"{request.mode} is unknown; pass a value of ActivationMode")
            _check_version("version", request.version)
            expected = request.expected_current_version if request.HasField("expected_current_version") else None
            previous = await self._versions.activate(request.version, mode, expected)
            return pb.ActivatePolicyResponse(previous_version=previous, policy=await self._describe(request.version))

        return await self._answer(context, activate)

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: grpc.aio.ServicerContext) -> pb.GetPolicyResponse:
        """See the protocol."""

        async def get() -> pb.GetPolicyResponse:
            _check_version("version", request.version)
            return pb.GetPolicyResponse(policy=await self._describe(request.version))

        return await self._answer(context, get)

    async def ListPolicies(
        self, request: pb.ListPoliciesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListPoliciesResponse:
        """See the protocol."""

        async def list_page() -> pb.ListPoliciesResponse:
            size = request.page_size or _DEFAULT_PAGE_SIZE
            if size > _MAX_PAGE_SIZE:
                raise over_limit("page_size", size, "page size", _MAX_PAGE_SIZE)
            below = _page_start(request.page_token)
            records = {record.version: record for record in await self._versions.store.list()}
            uploads = {header.version for header in self._versions.staging.pending()}
            numbers = [n for n in sorted({BASE_VERSION, *records, *uploads}, reverse=True) if n < below]
            page, rest = numbers[:size], numbers[size:]
            policies = [await self._describe(number, records.get(number)) for number in page]
            return pb.ListPoliciesResponse(policies=policies, next_page_token=str(page[-1]) if rest else "")

        return await self._answer(context, list_page)

    async def DeletePolicy(
        self, request: pb.DeletePolicyRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeletePolicyResponse:
        """See the protocol."""

        async def delete() -> pb.DeletePolicyResponse:
            _check_version("version", request.version)
            await self._versions.delete(request.version)
            return pb.DeletePolicyResponse()

        return await self._answer(context, delete)

    async def _answer(self, context: grpc.aio.ServicerContext, work: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            if self._draining:
                raise draining()
            return await work()
        except ServiceError as error:
            failure = error
        except (ChecksumError, TruncatedError) as error:
            failure = ServiceError(grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH", f"{error}; upload it again")
        except UploadBusyError as error:
            failure = ServiceError(grpc.StatusCode.ABORTED, "POLICY_CONFLICT", str(error), retry_after_seconds=1.0)
        except EngineLostError as error:
            failure = engine_restarted(str(error))
        except (PolicyStoreError, StagingError, OSError) as error:
            failure = store_failed(error)
        log.info("policy.refused", reason=failure.reason, field=failure.field, error=str(failure))
        await abort(context, failure)

    # -- uploading

    async def _upload(self, messages: AsyncIterator[pb.UploadPolicyRequest]) -> pb.UploadPolicyResponse:
        first = await anext(messages, None)
        if first is None or first.WhichOneof("part") != "header":
            raise invalid("header", "is missing; send it as the first message")
        header = self._header(first.header)
        record = await self._versions.begin_upload(header)
        if record is None:
            upload = await asyncio.to_thread(self._versions.staging.open, header)
            try:
                await self._receive(messages, header, upload)
                record = await self._versions.commit_upload(upload, header)
            finally:
                upload.close()
        return pb.UploadPolicyResponse(policy=await self._describe(record.version, record))

    async def _receive(
        self, messages: AsyncIterator[pb.UploadPolicyRequest], header: UploadHeader, upload: StagedUpload
    ) -> None:
        async for message in messages:
            if self._draining:
                raise draining()
            if message.WhichOneof("part") != "chunk":
                raise invalid("chunk", "is missing; send chunks after the header")
            chunk = message.chunk
            if not chunk.data:
                raise invalid("chunk.data", "is empty; send bytes, or end the upload")
            if chunk.offset != upload.committed_bytes:
                raise invalid(
                    "chunk.offset",
                    f"{chunk.offset} is not where the committed bytes end; continue at {upload.committed_bytes}",
                )
            if chunk.offset + len(chunk.data) > header.size_bytes:
                raise invalid(
                    "chunk.data", f"goes beyond header.size_bytes, {header.size_bytes}; send no more than that"
                )
            if google_crc32c.value(chunk.data) != chunk.crc32c:
                raise ServiceError(
                    grpc.StatusCode.DATA_LOSS,
                    "CHECKSUM_MISMATCH",
                    f"chunk.crc32c: differs from the CRC-32C of the chunk at {chunk.offset}; send it again",
                    field="chunk.crc32c",
                )
            await asyncio.to_thread(upload.append, chunk.offset, chunk.data)

    def _header(self, header: pb.PolicyHeader) -> UploadHeader:
        _check_version("header.version", header.version)
        if header.version == BASE_VERSION:
            raise invalid("header.version", "0 is the base checkpoint; pass 1 or more")
        kind = _KINDS.get(header.kind)
        if kind is None:
            raise invalid("header.kind", "is unknown; pass POLICY_KIND_FULL or POLICY_KIND_LORA")
        if not header.size_bytes:
            raise invalid("header.size_bytes", "is 0; pass the size of the file")
        if header.size_bytes > self._config.max_policy_bytes:
            raise over_limit("header.size_bytes", header.size_bytes, "max_policy_bytes", self._config.max_policy_bytes)
        if len(header.sha256) != 32:
            raise invalid("header.sha256", f"has {len(header.sha256)} bytes; pass the 32 bytes of the file's SHA-256")
        upload = UploadHeader(
            version=header.version,
            kind="full" if kind == "full" else "lora",
            size_bytes=header.size_bytes,
            sha256=header.sha256.hex(),
            lora_rank=None,
            lora_alpha=None,
            rank_pattern={},
            alpha_pattern={},
        )
        if kind == "full":
            for name in ("lora_rank", "lora_alpha"):
                if header.HasField(name):
                    raise invalid(f"header.{name}", "is only for a LoRA; leave it out, or set kind to POLICY_KIND_LORA")
            for name in ("rank_pattern", "alpha_pattern"):
                if getattr(header, name):
                    raise invalid(f"header.{name}", "is only for a LoRA; leave it out, or set kind to POLICY_KIND_LORA")
            return upload
        if not header.lora_rank:
            raise invalid("header.lora_rank", "is missing or 0; pass the LoRA's rank")
        for name, values in (("rank_pattern", header.rank_pattern), ("alpha_pattern", header.alpha_pattern)):
            if len(values) > _MAX_PATTERNS:
                raise over_limit(f"header.{name}", len(values), "number of patterns", _MAX_PATTERNS)
        for module, rank in header.rank_pattern.items():
            if not rank:
                raise invalid(f"header.rank_pattern[{module!r}]", "is 0; pass the module's rank")
        alpha = header.lora_alpha if header.HasField("lora_alpha") else float(header.lora_rank)
        alphas = {f"alpha_pattern[{module!r}]": value for module, value in header.alpha_pattern.items()}
        for name, value in {"lora_alpha": alpha, **alphas}.items():
            if not abs(value) <= _MAX_ALPHA:  # nor NaN
                raise invalid(f"header.{name}", f"is {value}; pass a finite number of at most {_MAX_ALPHA:g}")
        return replace(
            upload,
            lora_rank=header.lora_rank,
            lora_alpha=alpha,
            rank_pattern=dict(header.rank_pattern),
            alpha_pattern=dict(header.alpha_pattern),
        )

    # -- describing

    async def _describe(self, version: int, record: PolicyRecord | None = None) -> pb.PolicyVersion:
        versions = self._versions
        loaded = await versions.loaded(version)
        message = pb.PolicyVersion(
            version=version,
            state=pb.POLICY_STATE_CURRENT if version == versions.current else pb.POLICY_STATE_READY,
            fingerprint=loaded.fingerprint if loaded else 0,
        )
        if version == BASE_VERSION:
            assert loaded is not None
            message.bound_tensors, message.expected_tensors = loaded.bound_tensors, loaded.expected_tensors
            return message
        if record is None:
            try:
                record = await versions.store.get(version)
            except VersionMissingError as error:
                return self._describe_upload(version, error)
        message.kind = _KIND_NUMBERS[record.kind]
        message.size_bytes = message.committed_bytes = record.size_bytes
        message.sha256 = bytes.fromhex(record.sha256)
        message.bound_tensors, message.expected_tensors = record.bound_tensors, record.expected_tensors
        message.create_time.FromNanoseconds(int(record.create_time * 1e9))
        return message

    def _describe_upload(self, version: int, missing: VersionMissingError) -> pb.PolicyVersion:
        header = self._versions.staging.header(version)
        if header is None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "POLICY_UNAVAILABLE",
                f"version: policy version {version} is not in the store",
                field="version",
            ) from missing
        return pb.PolicyVersion(
            version=version,
            kind=_KIND_NUMBERS[header.kind],
            state=pb.POLICY_STATE_UPLOADING,
            size_bytes=header.size_bytes,
            committed_bytes=self._versions.staging.committed_bytes(version),
            sha256=bytes.fromhex(header.sha256),
        )


def store_failed(error: Exception) -> ServiceError:
    """The policy store cannot be used now."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "POLICY_UNAVAILABLE", str(error), retry_after_seconds=1.0)


def _check_version(field: str, version: int) -> None:
    if version > _MAX_VERSION:
        raise invalid(field, f"{version} is too large; pass at most {_MAX_VERSION}")


def _page_start(token: str) -> int:
    if not token:
        return _MAX_VERSION + 1
    if not (token.isascii() and token.isdecimal() and len(token) <= 20):
        raise invalid("page_token", "is not one of this server's; pass next_page_token of the page before, or none")
    return int(token)
