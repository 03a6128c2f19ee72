"""The policy versions of one server: what the store has, what the engine has loaded, and which one is current."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import structlog
from diffusion_rollout.v1 import rollout_pb2 as pb

from rollout_service.config import ServerConfig
from rollout_service.engine.client import EngineClient, EngineLostError
from rollout_service.policy.content import LoraSettings
from rollout_service.policy.staging import StagedUpload, Staging, UploadBusyError, UploadHeader
from rollout_service.policy.store import (
    Activation,
    ActivationConflictError,
    Mode,
    PolicyRecord,
    PolicyStore,
    PolicyStoreError,
    VersionExistsError,
    VersionMissingError,
)

from .errors import ServiceError, invalid

log = structlog.get_logger(__name__)

BASE_VERSION = 0
#: How long a version may wait until running rollouts let go of another that makes room for it.
ROOM_TIMEOUT_SECONDS = 600.0
_ROOM_POLL_SECONDS = 0.05
#: How many names of each list an error holds.
NAMES_SHOWN = 20
#: A status travels in HTTP/2 trailers, of which 8 KiB are safe; names are cut short together to this many characters.
_NAMES_TEXT = 4000


@dataclass(frozen=True)
class PolicyChoice:
    """The version that a rollout starts on, which is loaded; see RolloutSpec for the other two."""

    version: int
    pinned: bool = False
    minimum: int = 0


@dataclass
class LoadedVersion:
    """A version that the engine has loaded."""

    bound_tensors: int
    expected_tensors: int
    fingerprint: int
    last_used: float


class PolicyVersions:
    """Policy versions of one server.

    Args:
        engine: the engine client; started before :meth:`start`.
        config: settings; ``policy_store`` and ``policy_scratch`` must be set.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        assert config.policy_store is not None
        assert config.policy_scratch is not None
        self._engine, self._config = engine, config
        scratch = Path(config.policy_scratch)
        self.staging = Staging(scratch / "uploads")
        self._cache = scratch / "versions"
        self._store: PolicyStore | None = None
        self._activation = Activation(0, BASE_VERSION, "new_rollouts")
        self._loaded: dict[int, LoadedVersion] = {}
        self._loading = asyncio.Lock()
        self._activating = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None

    @property
    def current(self) -> int:
        """The version that new rollouts use."""
        return self._activation.version

    @property
    def store(self) -> PolicyStore:
        """The store; open once started."""
        if self._store is None:
            raise RuntimeError("the policy store has not been opened")
        return self._store

    # -- life

    async def start(self) -> None:
        """Open the store, load its current version and follow it from now on.

        Raises:
            PolicyStoreError: the store cannot be used, or its current version cannot be served.
        """
        assert self._config.policy_store is not None
        self._cache.mkdir(parents=True, exist_ok=True)
        for left in self._cache.iterdir():
            left.unlink()
        self._store = PolicyStore.open(self._config.policy_store)
        await self._store.sweep()
        try:
            await self.refresh()
        except ServiceError as error:
            raise PolicyStoreError(
                f"{self._config.policy_store}: its current version cannot be served: {error}"
            ) from error
        self._follower = asyncio.create_task(self._follow(), name="policy-follower")

    async def stop(self) -> None:
        """Follow the store no more."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)

    def engine_down(self) -> None:
        """Nothing is loaded any more."""
        self._loaded.clear()

    async def engine_up(self) -> None:
        """Load the current version into an engine that has just started; tries until it succeeds."""
        while True:
            try:
                await self._load(self.current)
                await self._engine.activate_policy(self.current, "new_rollouts")
                return
            except EngineLostError:
                return  # there will be another one
            except (ServiceError, PolicyStoreError) as error:
                log.error("policy.load_failed", version=self.current, error=str(error))
                await asyncio.sleep(self._config.policy_poll_seconds)

    async def refresh(self) -> None:
        """Make the store's current version this server's."""
        async with self._activating:
            await self._apply(await self.store.current())

    async def _follow(self) -> None:
        failed: str | None = None
        while True:
            await asyncio.sleep(self._config.policy_poll_seconds)
            try:
                await self.refresh()
                failed = None
            except (ServiceError, PolicyStoreError, EngineLostError) as error:
                if str(error) != failed:  # not the same line twice a second
                    log.error("policy.follow_failed", error=str(error))
                failed = str(error)

    async def _apply(self, activation: Activation) -> None:
        if activation.sequence <= self._activation.sequence:
            return
        await self._load(activation.version)
        # No await before both are set, so that nothing is submitted in between.
        answer = self._engine.activate_policy(activation.version, activation.mode)
        self._activation = activation
        log.info("policy.activated", version=activation.version, mode=activation.mode)
        await answer

    # -- loading

    async def _load(self, version: int, wait_for_room: bool = True) -> None:
        """See that the engine has a version. When this returns, nothing has run since: it is still loaded.

        Raises:
            ServiceError: there is no such version, it does not bind, or there is no room for it.
            PolicyStoreError: the store cannot be read.
            EngineLostError: the engine is not up.
        """
        if version != BASE_VERSION and version not in self._loaded:
            async with self._loading:
                if version not in self._loaded:
                    await self._load_from_store(version, wait_for_room)
        if version in self._loaded:
            self._loaded[version].last_used = time.monotonic()

    async def _load_from_store(self, version: int, wait_for_room: bool) -> None:
        try:
            record = await self.store.get(version)
        except VersionMissingError as error:
            raise _unavailable(f"policy version {version} is not in the store", "version") from error
        await self._make_room(version, wait_for_room)
        path = self._cache_path(version)
        if not path.exists():
            await self.store.fetch(record, path)
        settings = asdict(_lora_settings(record)) if record.kind == "lora" else None
        answer = await self._engine.load_policy(
            version, record.kind, str(path), settings, check_values=False, keep=True
        )
        if record.kind == "lora" or "problem" in answer:
            path.unlink(missing_ok=True)  # the engine has copied it
        if "problem" in answer:
            raise _unavailable(
                f"policy version {version} does not fit this server's model: {answer['problem']}", "version"
            )
        self._loaded[version] = LoadedVersion(
            answer["bound_tensors"], answer["expected_tensors"], answer["fingerprint"], time.monotonic()
        )

    async def _make_room(self, version: int, wait: bool) -> None:
        deadline = time.monotonic() + (ROOM_TIMEOUT_SECONDS if wait else 0)
        while len(self._loaded) >= self._config.max_policy_versions:
            keep = self._engine.versions_in_use() | {self.current}
            unused = [loaded for loaded in self._loaded if loaded not in keep]
            if unused:
                self._unload(min(unused, key=lambda loaded: self._loaded[loaded].last_used))
                continue
            if time.monotonic() >= deadline:
                raise ServiceError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "QUEUE_FULL",
                    f"policy version {version} cannot be loaded: rollouts use all of the "
                    f"{self._config.max_policy_versions} versions that may be (max_policy_versions)",
                    retry_after_seconds=1.0,
                )
            await asyncio.sleep(_ROOM_POLL_SECONDS)

    def _unload(self, version: int) -> None:
        if self._loaded.pop(version, None) is not None:
            self._engine.unload_policy(version)
            self._cache_path(version).unlink(missing_ok=True)

    def _cache_path(self, version: int) -> Path:
        return self._cache / f"{version}.safetensors"

    # -- what a rollout may run on

    async def resolve(self, policy: pb.PolicyRequirement) -> PolicyChoice:
        """The version that a rollout is to start on. It is loaded; nothing has run since.

        Raises:
            ServiceError: the requirement cannot be met within its bound.
            PolicyStoreError: the store cannot be read.
            EngineLostError: the engine is not up.
        """
        kind = policy.WhichOneof("kind")
        if kind is None:
            return await self._current_choice(0)
        wanted = getattr(policy, kind)
        deadline = time.monotonic() + policy.max_wait.seconds + policy.max_wait.nanos / 1e9
        while not await self._is_there(kind, wanted):
            left = deadline - time.monotonic()
            if left <= 0:
                state = "is not in the store" if kind == "exactly" else f"is not current yet, {self.current} is"
                waited = " within max_wait" if policy.HasField("max_wait") else "; pass max_wait to wait for it"
                raise _unavailable(f"policy.{kind}: version {wanted} {state}{waited}", f"policy.{kind}")
            await asyncio.sleep(min(left, self._config.policy_poll_seconds))
        if kind == "at_least":
            return await self._current_choice(wanted)
        await self._load(wanted)
        return PolicyChoice(wanted, pinned=True)

    async def _is_there(self, kind: str, wanted: int) -> bool:
        if kind == "exactly":
            if wanted == BASE_VERSION or wanted in self._loaded:
                return True
            with contextlib.suppress(VersionMissingError):
                await self.store.get(wanted)
                return True
            return False
        if self.current < wanted:
            await self.refresh()
        return self.current >= wanted

    async def _current_choice(self, minimum: int) -> PolicyChoice:
        while True:
            version = self.current
            await self._load(version)
            # Another version may have been activated while this one was being loaded.
            if version == self.current:
                return PolicyChoice(version, minimum=minimum)

    # -- uploads

    async def begin_upload(self, header: UploadHeader) -> PolicyRecord | None:
        """Check a header against the store; returns the version if it is there already, with the same content.

        Raises:
            ServiceError: its number is taken, or not above all others.
            PolicyStoreError: the store cannot be read.
        """
        with contextlib.suppress(VersionMissingError):
            record = await self.store.get(header.version)
            if _header(record) == header:
                return record
            raise _exists(f"version {header.version} exists with other content or settings; pass a higher number")
        highest = await self.store.highest()
        if header.version <= highest:
            if header.version == highest:
                raise _exists(f"version {header.version} was deleted; pass a higher number")
            raise invalid("header.version", f"{header.version} goes back; pass more than {highest}, the highest so far")
        return None

    async def commit_upload(self, upload: StagedUpload, header: UploadHeader) -> PolicyRecord:
        """Check a complete upload against the denoisers, store it, and load it if there is room.

        Raises:
            ServiceError: it cannot be served; or its version was taken in the meantime.
            ChecksumError, TruncatedError: it is not the file that its header describes.
            PolicyStoreError: the store cannot be written.
            EngineLostError: the engine is not up, or ended; the upload is kept.
        """
        path = await asyncio.to_thread(upload.finish)
        settings = asdict(_lora_settings(header)) if header.kind == "lora" else None
        answer = await self._engine.load_policy(
            header.version, header.kind, str(path), settings, check_values=True, keep=False
        )
        if "problem" in answer:
            upload.discard()
            raise _refused(answer["problem"], answer["lists"])
        record = PolicyRecord(
            **asdict(header),
            bound_tensors=answer["bound_tensors"],
            expected_tensors=answer["expected_tensors"],
            create_time=time.time(),
        )
        try:
            if await self.begin_upload(header) is None:
                record = await self.store.add(record, path)
        except VersionExistsError as error:
            upload.discard()
            raise _exists(str(error)) from error
        except ServiceError:
            upload.discard()
            raise
        if header.version not in self._loaded:
            os.replace(path, self._cache_path(header.version))
        upload.discard()
        for old in self.staging.pending():
            if old.version < header.version:
                with contextlib.suppress(UploadBusyError):  # it ends with an error, as its version goes back
                    self.staging.discard(old.version)
        log.info("policy.uploaded", version=header.version, kind=header.kind, size_bytes=header.size_bytes)
        try:
            await self._load(header.version, wait_for_room=False)
        except (ServiceError, EngineLostError) as error:  # it is stored: it loads when it is needed
            log.info("policy.not_loaded_yet", version=header.version, why=str(error))
            self._cache_path(header.version).unlink(missing_ok=True)
        return record

    # -- the rest

    async def activate(self, version: int, mode: Mode, expected_current: int | None) -> int:
        """Make a version current, here and in the store; returns the one before.

        Raises:
            ServiceError: it is unknown, another one is current than was expected, or another activation came first.
            PolicyStoreError: the store cannot be used.
            EngineLostError: the engine is not up.
        """
        async with self._activating:
            before = await self.store.current()
            if expected_current is not None and before.version != expected_current:
                raise _conflict(
                    f"expected_current_version: version {before.version} is current, not {expected_current}",
                    before.version,
                )
            try:
                await self._load(version)
                after = await self.store.activate(version, mode, before)
            except ActivationConflictError as error:
                current = error.current.version
                raise _conflict(f"version {current} was activated at the same time; try again", current) from error
            await self._apply(after)
            return before.version

    async def delete(self, version: int) -> None:
        """Delete a version.

        Raises:
            ServiceError: it is unknown, current, in use, or version 0.
            PolicyStoreError: the store cannot be written.
        """
        async with self._activating:
            current = (await self.store.current()).version
            if version in (BASE_VERSION, current, self.current):
                what = "the base checkpoint" if version == BASE_VERSION else "current; activate another first"
                raise _conflict(f"version {version} is {what}", current)
            if version in self._engine.versions_in_use():
                raise _conflict(f"version {version} is in use by running rollouts; try again later", current)
            try:
                await self.store.get(version)
                await self.store.delete(version)
            except VersionMissingError as error:
                if self.staging.header(version) is None:
                    raise _unavailable(f"version {version} is not in the store", "version") from error
                self.staging.discard(version)
            if version not in self._engine.versions_in_use():
                self._unload(version)

    async def loaded(self, version: int) -> LoadedVersion | None:
        """What the engine has of a version; its fingerprint is asked for anew while it is 0."""
        if version == BASE_VERSION:
            tensors = self._engine.facts.num_weights
            return LoadedVersion(tensors, tensors, await self._engine.policy_fingerprint(version), 0)
        loaded = self._loaded.get(version)
        if loaded is not None:
            loaded.fingerprint = await self._engine.policy_fingerprint(version)
        return loaded


def _header(record: PolicyRecord) -> UploadHeader:
    names = UploadHeader.__dataclass_fields__
    return UploadHeader(**{name: getattr(record, name) for name in names})


def _lora_settings(source: PolicyRecord | UploadHeader) -> LoraSettings:
    assert source.lora_rank is not None
    alpha = source.lora_rank if source.lora_alpha is None else source.lora_alpha
    return LoraSettings(source.lora_rank, alpha, dict(source.rank_pattern), dict(source.alpha_pattern))


def _unavailable(message: str, field: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_UNAVAILABLE", message, field=field)


def _exists(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.ALREADY_EXISTS, "POLICY_CONFLICT", message, field="header.version")


def _conflict(message: str, current: int) -> ServiceError:
    metadata = {"current_version": str(current)}
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_CONFLICT", message, metadata=metadata)


def _refused(problem: str, lists: dict[str, list[str]]) -> ServiceError:
    """A file that does not bind: the first names of each list, one per line, and the counts."""
    metadata: dict[str, str] = {}
    left = _NAMES_TEXT
    for what, names in lists.items():
        metadata[f"{what}_count"] = str(len(names))
        shown: list[str] = []
        for name in names[:NAMES_SHOWN]:
            left -= len(name.encode()) + 1
            if left < 0:
                break
            shown.append(name)
        metadata[what] = "\n".join(shown)
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", f"content: {problem}", field="content", metadata=metadata
    )
