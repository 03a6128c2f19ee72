"""Policy versions that workers share: a directory, or an object store such as S3.

Layout, in the order in which things are written::

    versions/{version}/{sha256}.safetensors   data, before its record
    versions/{version}.json                   record: the version exists from here on
    versions/{version}.deleted                tombstone: gone for good, whatever else is left of it
    activations/{sequence}.json               the highest one is current

Records and activations are created only if absent, and never changed; so of two writers one wins, and no reader sees
half of anything. Nothing needs a lock, and a writer that dies leaves at most what `sweep` removes.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import HTTPStore, LocalStore, from_url

if TYPE_CHECKING:  # they are in obstore's stubs only
    from obstore.store import ObjectStore, RetryConfig

Kind = Literal["full", "lora"]
Mode = Literal["new_rollouts", "next_step", "abort"]

MIB = 1 << 20
MAX_VERSION = 2**63 - 1
#: Activations that `sweep` keeps.
ACTIVATIONS_KEPT = 8
#: Age from which `sweep` takes what no record names for abandoned. S3 dates an object by the start of its upload, so
#: this is also how long an upload may take.
GRACE_SECONDS = 6 * 3600.0

_MAX_NUMBER = 1e18
_PART_BYTES = 8 * MIB
_PARTS_AT_ONCE = 4
#: S3 allows 10,000 parts of an upload.
_MAX_PARTS = 9_000
_RECORDS_AT_ONCE = 16
_ATTEMPTS = 5
#: One request moves one part at most, so that obstore's time limit of 30 s a request is enough for any policy. Options
#: of the HTTP client are not set here: they would replace those of the environment, such as AWS_ALLOW_HTTP, altogether.
_RETRY: RetryConfig = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=3), "base": 2},
}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MARKER = re.compile(r"versions/(\d{20})\.(json|deleted)")
_DATA = re.compile(r"versions/(\d{20})/.+")
_ACTIVATION = re.compile(r"activations/(\d{20})\.json")
#: Names under which obstore writes a file of a directory before it renames it; its listings leave them out.
_UNFINISHED = re.compile(r".+#\d+")


class PolicyStoreError(Exception):
    """The store cannot be read or written."""


class VersionExistsError(PolicyStoreError):
    """The version exists with other content, or existed and was deleted."""


class VersionMissingError(PolicyStoreError):
    """No such version."""


class ActivationConflictError(PolicyStoreError):
    """Another activation came first: `current`."""

    def __init__(self, current: Activation) -> None:
        self.current = current
        super().__init__(f"another activation came first: version {current.version}, sequence {current.sequence}")


def _is_int(low: int, high: int = MAX_VERSION) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MAX_NUMBER < value < _MAX_NUMBER  # not NaN, which compares as false


def _is_map(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(isinstance(name, str) and check(one) for name, one in value.items())
    )


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_FIELD_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "version": _is_int(1),
    "kind": lambda value: isinstance(value, str) and value in get_args(Kind),
    "size_bytes": _is_int(0),
    "sha256": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
    "lora_rank": _or_none(_is_int(1)),
    "lora_alpha": _or_none(_is_number),
    "rank_pattern": _is_map(_is_int(1)),
    "alpha_pattern": _is_map(_is_number),
    "bound_tensors": _is_int(0),
    "expected_tensors": _is_int(0),
    "create_time": _is_number,
}


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text holds; ValueError if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def checked_fields(value: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The fields of a record or header, if they are exactly `names` and of the right types; ValueError otherwise."""
    if value.keys() != names:
        raise ValueError(f"fields {sorted(value)} instead of {sorted(names)}")
    for name in names:
        if not _FIELD_CHECKS[name](value[name]):
            raise ValueError(f"bad {name}: {value[name]!r:.100}")
    fields = dict(value)
    for name in ("lora_alpha", "create_time"):
        if fields.get(name) is not None:
            fields[name] = float(fields[name])
    fields["alpha_pattern"] = {module: float(alpha) for module, alpha in fields["alpha_pattern"].items()}
    return fields


@dataclass(frozen=True)
class PolicyRecord:
    """A stored version."""

    version: int
    kind: Kind
    size_bytes: int
    sha256: str
    """Of the file, in lower-case hex."""
    lora_rank: int | None
    lora_alpha: float | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    bound_tensors: int
    expected_tensors: int
    create_time: float
    """Seconds since the epoch."""

    def to_json(self) -> str:
        """A JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> PolicyRecord:
        """What `to_json` gave; ValueError if it could not have."""
        return cls(**checked_fields(json_object(text), set(cls.__dataclass_fields__)))

    def same_policy(self, other: PolicyRecord) -> bool:
        """Whether both are the same file with the same settings, whenever they were added and whatever it bound to."""
        unlike = {"bound_tensors", "expected_tensors", "create_time"}
        return all(getattr(self, name) == getattr(other, name) for name in self.__dataclass_fields__.keys() - unlike)


@dataclass(frozen=True)
class Activation:
    """Which version rollouts use from here on; version 0 is the model as loaded."""

    sequence: int
    version: int
    mode: Mode


NO_ACTIVATION = Activation(0, 0, "new_rollouts")


class PolicyStore:
    """Versions and activations in an object store; see the module. Any number of processes may use one at once."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        self._directory = store.prefix if isinstance(store, LocalStore) else None

    @classmethod
    def open(cls, url_or_directory: str) -> PolicyStore:
        """Open a store; a directory is made if it does not exist, a bucket is not.

        Credentials, endpoint and region of a bucket are taken from the environment (for S3 AWS_ACCESS_KEY_ID,
        AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT, AWS_ALLOW_HTTP, ...).
        """
        with _converted(f"open the policy store {url_or_directory}"):
            # automatic_cleanup: the directory of a version goes with its last file.
            if url_or_directory.startswith("file://"):
                store = LocalStore.from_url(url_or_directory, mkdir=True, automatic_cleanup=True)
            elif _URL.match(url_or_directory) or not url_or_directory:
                store = from_url(url_or_directory, retry_config=_RETRY)
            else:
                store = LocalStore(Path(url_or_directory).absolute(), mkdir=True, automatic_cleanup=True)
        if isinstance(store, HTTPStore):
            raise PolicyStoreError(
                f"cannot open the policy store {url_or_directory}: a plain web server cannot keep one"
            )
        return cls(store, url_or_directory)

    async def get(self, version: int) -> PolicyRecord:
        """A version's record; VersionMissingError if there is none."""
        record, deleted = await asyncio.gather(self._record(version), self._exists(_tombstone(version)))
        if record is None or deleted:
            raise VersionMissingError(f"no policy version {version}" + (": it was deleted" if deleted else ""))
        return record

    async def list(self) -> builtins.list[PolicyRecord]:
        """Every version, latest first."""
        records, tombstones = await self._markers()
        limit = asyncio.Semaphore(_RECORDS_AT_ONCE)

        async def record(version: int) -> PolicyRecord | None:
            async with limit:
                return await self._record(version)

        found = await asyncio.gather(*(record(version) for version in sorted(records - tombstones, reverse=True)))
        return [one for one in found if one is not None]  # None: deleted since

    async def highest(self) -> int:
        """The highest version there ever was, deleted ones included; 0 if there was none."""
        records, tombstones = await self._markers()
        return max(records | tombstones, default=0)

    async def add(self, record: PolicyRecord, file: Path) -> PolicyRecord:
        """Add a version; VersionExistsError if it exists with other content or was deleted.

        A file that is not the one of the record is PolicyStoreError, a record that could not be read back ValueError.

        Returns:
            The record as stored: an earlier one if the same file was added with the same settings before.
        """
        PolicyRecord.from_json(record.to_json())  # what is written can be read
        if await self._exists(_tombstone(record.version)):
            raise _deleted(record.version)
        stored = await self._record(record.version)
        if stored is not None and not record.same_policy(stored):
            raise _other_content(record.version)
        await asyncio.to_thread(_check_file, record, file)
        if stored is None:
            await self._upload(record, file)
            stored = await self._commit(record)
        if not stored.same_policy(record):
            # No record will ever name this data. Data with the digest of the record is the winner's.
            if stored.sha256 != record.sha256:
                await self._delete(_data(record))
            raise _other_content(record.version)
        # A delete that came between the first look and the commit would not have seen this record or its data.
        if await self._exists(_tombstone(record.version)):
            await self._clear(record.version)
            raise _deleted(record.version)
        # A sweep may have taken data for abandoned that an earlier attempt left and this one wrote again.
        if not await self._exists(_data(record)):
            await self._upload(record, file)
        return stored

    async def fetch(self, record: PolicyRecord, target: Path) -> None:
        """Copy a version's data to `target`, which is there only once it is complete and its digest was checked.

        A process that is killed meanwhile leaves a file `.{name of target}.*.part` in the same directory.
        """
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        what = f"read the data of policy version {record.version}"
        digest = hashlib.sha256()

        def write(parts: builtins.list[Any]) -> None:
            # Opened each time, and never created here: if the caller is cancelled, this thread may outlive it.
            with temporary.open("r+b") as out:
                out.seek(0, os.SEEK_END)
                for part in parts:
                    digest.update(part)
                    out.write(part)

        try:
            with _converted(what):
                temporary.touch(exist_ok=False)
                try:
                    size = (await obstore.head_async(self._store, _data(record)))["size"]
                    if size != record.size_bytes:
                        raise _differs(record, f"{size} bytes instead of {record.size_bytes}")
                    async for parts in self._parts(_data(record), size):
                        await asyncio.to_thread(write, parts)
                except FileNotFoundError:
                    if await self._exists(_tombstone(record.version)):
                        raise VersionMissingError(f"no policy version {record.version}: it was deleted") from None
                    raise
                if digest.hexdigest() != record.sha256:
                    raise _differs(record, f"sha256 {digest.hexdigest()} instead of {record.sha256}")
                await asyncio.to_thread(_sync, temporary)
                os.replace(temporary, target)
                await asyncio.to_thread(_sync, target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    async def delete(self, version: int) -> None:
        """Delete a version for good, the active one too; VersionMissingError if there never was one.

        Deleting it again completes a delete that was cut short.
        """
        if not await self._exists(_tombstone(version)):
            if not await self._exists(_record(version)):
                raise VersionMissingError(f"no policy version {version}")
            await self._create(_tombstone(version), {"delete_time": time.time()})
        await self._clear(version)

    async def current(self) -> Activation:
        """The latest activation; `NO_ACTIVATION` if there was none."""
        for _ in range(_ATTEMPTS):
            sequence = max(await self._activations(), default=0)
            if sequence == 0:
                return NO_ACTIVATION
            stored = await self._activation(sequence)
            if stored is not None:
                return stored[0]
            # Removed since, being one of the oldest by now.
        raise PolicyStoreError(f"activations in {self._name} vanish while they are read")

    async def activate(self, version: int, mode: Mode, after: Activation) -> Activation:
        """Activate a version, unless anything was activated since `after`: then ActivationConflictError.

        Version 0 is the model as loaded. A version that does not exist is VersionMissingError.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, not {mode!r}")
        if version != 0:
            await self.get(version)
        # Not only for a better answer: the next sequence number of an old activation is free again once swept.
        if (current := await self.current()) != after:
            raise ActivationConflictError(current)
        activation = Activation(after.sequence + 1, version, mode)
        # The token tells one's own activation, whose answer was lost and which was then sent again, from another's.
        token = secrets.token_hex(8)
        content = {**dataclasses.asdict(activation), "token": token}
        for _ in range(_ATTEMPTS):
            if await self._create(_activation(activation.sequence), content):
                return activation
            stored = await self._activation(activation.sequence)
            if stored == (activation, token):
                return activation
            if stored is not None:
                raise ActivationConflictError(await self.current())
            # Refused because of a write that then failed; S3 does that.
        raise PolicyStoreError(f"activation {activation.sequence} in {self._name} can be neither created nor read")

    async def sweep(self, grace_seconds: float = GRACE_SECONDS) -> int:
        """Remove what nothing uses: data that no record names, what is left of deleted versions, old activations.

        What may belong to an operation under way is left alone for `grace_seconds`. Uploads to a bucket that were
        never completed are not visible here; let the bucket expire them.

        Returns:
            The number of objects removed.
        """
        oldest = time.time() - grace_seconds
        records, tombstones = await self._markers()
        data: dict[int, builtins.list[str]] = {}
        old: set[str] = set()
        for path, modified in await self._listing("versions"):
            if match := _DATA.fullmatch(path):
                data.setdefault(int(match[1]), []).append(path)
                if modified <= oldest:
                    old.add(path)
        removed = 0
        for version in sorted(tombstones & (records | data.keys())):
            removed += await self._clear(version)
        for version in sorted(data.keys() - tombstones):
            if not old.intersection(data[version]):
                continue
            try:
                # Read now, not taken from the listing: the version may have been added since.
                record = await self._record(version)
            except PolicyStoreError:
                continue  # which of its files it names is unknown
            keep = None if record is None else _data(record)
            for path in data[version]:
                if path in old and path != keep and await self._modified(path) <= oldest:
                    removed += await self._delete(path)
        activations = await self._activations()
        for sequence in sorted(activations)[:-ACTIVATIONS_KEPT]:
            if activations[sequence] <= oldest:
                removed += await self._delete(_activation(sequence))
        if self._directory is not None:
            removed += await asyncio.to_thread(_remove_unfinished, self._directory, oldest)
        return removed

    async def _commit(self, record: PolicyRecord) -> PolicyRecord:
        """Create the record; what is stored then, which may be another's."""
        for _ in range(_ATTEMPTS):
            if await self._create(_record(record.version), dataclasses.asdict(record)):
                return record
            if (stored := await self._record(record.version)) is not None:
                return stored
            if await self._exists(_tombstone(record.version)):
                await self._clear(record.version)
                raise _deleted(record.version)
            # Refused because of a write that then failed; S3 does that.
        raise PolicyStoreError(f"policy version {record.version} can be neither created nor read")

    async def _upload(self, record: PolicyRecord, file: Path) -> None:
        path = _data(record)
        with _converted(f"write {path}"):
            await obstore.put_async(
                self._store,
                path,
                file,
                chunk_size=max(_PART_BYTES, -(-record.size_bytes // _MAX_PARTS)),
                max_concurrency=_PARTS_AT_ONCE,
            )
            await self._sync(path)

    async def _parts(self, path: str, size: int) -> AsyncIterator[builtins.list[Any]]:
        """The object in order, a few parts at a time, fetched at once."""
        for start in range(0, size, _PART_BYTES * _PARTS_AT_ONCE):
            stop = min(size, start + _PART_BYTES * _PARTS_AT_ONCE)
            yield await asyncio.gather(
                *(
                    obstore.get_range_async(self._store, path, start=at, end=min(stop, at + _PART_BYTES))
                    for at in range(start, stop, _PART_BYTES)
                )
            )

    async def _clear(self, version: int) -> int:
        """Remove what is left of a version that has a tombstone."""
        removed = await self._delete(_record(version))
        for path, _ in await self._listing(f"versions/{version:020d}"):
            removed += await self._delete(path)
        return removed

    async def _markers(self) -> tuple[set[int], set[int]]:
        """Versions that have a record, and that have a tombstone."""
        found: dict[str, set[int]] = {"json": set(), "deleted": set()}
        with _converted(f"list the versions in {self._name}"):
            listing = await obstore.list_with_delimiter_async(self._store, "versions")
        for meta in listing["objects"]:
            if match := _MARKER.fullmatch(meta["path"]):
                found[match[2]].add(int(match[1]))
        return found["json"], found["deleted"]

    async def _activations(self) -> dict[int, float]:
        """Times of the stored activations by sequence."""
        listing = await self._listing("activations")
        return {int(match[1]): modified for path, modified in listing if (match := _ACTIVATION.fullmatch(path))}

    async def _activation(self, sequence: int) -> tuple[Activation, str] | None:
        """An activation and its token."""
        path = _activation(sequence)
        content = await self._read(path)
        if content is None:
            return None
        try:
            value = json_object(content)
            if (
                value.keys() != {"sequence", "version", "mode", "token"}
                or (value["sequence"], type(value["sequence"])) != (sequence, int)
                or not _is_int(0)(value["version"])
                or value["mode"] not in get_args(Mode)
                or not isinstance(value["token"], str)
            ):
                raise ValueError(f"not an activation: {value!r:.200}")
        except (ValueError, TypeError) as error:
            raise PolicyStoreError(f"{path} in {self._name} is broken: {error}") from None
        return Activation(sequence, value["version"], value["mode"]), value["token"]

    async def _record(self, version: int) -> PolicyRecord | None:
        path = _record(version)
        content = await self._read(path)
        if content is None:
            return None
        try:
            record = PolicyRecord.from_json(content)
            if record.version != version:
                raise ValueError(f"it says version {record.version}")
        except ValueError as error:
            raise PolicyStoreError(f"{path} in {self._name} is broken: {error}") from None
        return record

    async def _read(self, path: str) -> bytes | None:
        with _converted(f"read {path}"):
            try:
                result = await obstore.get_async(self._store, path)
                return bytes(await result.bytes_async())
            except FileNotFoundError:
                return None

    async def _create(self, path: str, content: Mapping[str, Any]) -> bool:
        """Write an object, unless there is one."""
        with _converted(f"write {path}"):
            try:
                await obstore.put_async(self._store, path, json.dumps(content).encode(), mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            await self._sync(path)
        return True

    async def _exists(self, path: str) -> bool:
        return await self._modified(path) != math.inf

    async def _modified(self, path: str) -> float:
        """When an object was written; infinity if there is none."""
        with _converted(f"look for {path}"):
            try:
                return (await obstore.head_async(self._store, path))["last_modified"].timestamp()
            except FileNotFoundError:
                return math.inf

    async def _delete(self, path: str) -> bool:
        with _converted(f"delete {path}"):
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                return False
        return True

    async def _listing(self, under: str) -> builtins.list[tuple[str, float]]:
        """Paths and times of all objects under a path."""
        with _converted(f"list {under}/ in {self._name}"):
            return [
                (meta["path"], meta["last_modified"].timestamp())
                for meta in await obstore.list(self._store, under).collect_async()
            ]

    async def _sync(self, path: str) -> None:
        """Bring a file of a directory to the disk, which obstore does not; what is written after it may rely on it."""
        if self._directory is not None:
            file = self._directory / path
            await asyncio.to_thread(_sync, file, *list(file.parents)[: 1 + path.count("/")])


def _record(version: int) -> str:
    return f"versions/{version:020d}.json"


def _tombstone(version: int) -> str:
    return f"versions/{version:020d}.deleted"


def _data(record: PolicyRecord) -> str:
    return f"versions/{record.version:020d}/{record.sha256}.safetensors"


def _activation(sequence: int) -> str:
    return f"activations/{sequence:020d}.json"


def _deleted(version: int) -> VersionExistsError:
    return VersionExistsError(f"policy version {version} was deleted; a version number is used once")


def _other_content(version: int) -> VersionExistsError:
    return VersionExistsError(f"policy version {version} exists with other content or settings")


def _differs(record: PolicyRecord, how: str) -> PolicyStoreError:
    return PolicyStoreError(f"the data of policy version {record.version} differs from its record: {how}")


def sha256_of(file: Path) -> str:
    """The sha256 of a file, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_file(record: PolicyRecord, file: Path) -> None:
    with _converted(f"read {file.name}, the file of policy version {record.version}"):
        size = file.stat().st_size
        if size != record.size_bytes:
            raise _differs(record, f"{size} bytes instead of {record.size_bytes}")
        digest = sha256_of(file)
    if digest != record.sha256:
        raise _differs(record, f"sha256 {digest} instead of {record.sha256}")


def _sync(*paths: Path) -> None:
    """Wait until files or directories are on the disk."""
    for path in paths:
        # A file that is gone was deleted meanwhile.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _remove_unfinished(directory: Path, oldest: float) -> int:
    """Remove what writers that died left in a directory, under names that listings leave out."""
    removed = 0
    with _converted(f"sweep {directory}"):
        for top in ("versions", "activations"):
            for parent, _, names in os.walk(directory / top):
                for path in (Path(parent, name) for name in names if _UNFINISHED.fullmatch(name)):
                    # What is gone was completed, or swept by another.
                    with contextlib.suppress(FileNotFoundError):
                        if path.stat().st_mtime <= oldest:
                            path.unlink()
                            removed += 1
                if parent != str(directory / top):
                    with contextlib.suppress(OSError):  # not empty
                        os.rmdir(parent)
    return removed


@contextlib.contextmanager
def _converted(what: str) -> Iterator[None]:
    """Errors of obstore and of the system as PolicyStoreError: "cannot {what}: ..."."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        # obstore appends pages of Rust debug output to its messages.
        reason = cast(str, str(error).split("\n", 1)[0])
        raise PolicyStoreError(f"cannot {what}: {reason}") from error
