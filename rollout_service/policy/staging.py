"""Uploads of policies under way, in a directory: resumable by offset, also after the process was killed.

A version's upload is three files: `{version}.json`, its header; `{version}.{sha256}.part`, the bytes so far; and
`{version}.lock`. How far it got is the size of the middle one, so nothing has to be kept in step with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rollout_service.policy.store import Kind, checked_fields, json_object, sha256_of

_HEADER = re.compile(r"(\d{20})\.json")


class StagingError(Exception):
    """An upload cannot be kept."""


class UploadBusyError(StagingError):
    """The version is being uploaded already."""


class TruncatedError(StagingError):
    """Bytes are missing; the upload can go on."""


class ChecksumError(StagingError):
    """The bytes are not those that were announced; they were discarded."""


@dataclass(frozen=True)
class UploadHeader:
    """What an upload announces."""

    version: int
    kind: Kind
    size_bytes: int
    sha256: str
    """Of the file, in lower-case hex."""
    lora_rank: int | None
    lora_alpha: float | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    def to_json(self) -> str:
        """A JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> UploadHeader:
        """What `to_json` gave; ValueError if it could not have."""
        return cls(**checked_fields(json_object(text), set(cls.__dataclass_fields__)))


class Staging:
    """Uploads under way in `directory`, which is made if it does not exist."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with _converted("make the staging directory"):
            directory.mkdir(parents=True, exist_ok=True)

    def open(self, header: UploadHeader) -> StagedUpload:
        """Begin an upload, or go on with it if the header is the same; with another header it begins anew.

        UploadBusyError if it is open already, here or in another process. ValueError if the header is not sound.
        """
        UploadHeader.from_json(header.to_json())  # what is written can be read; also, a digest is a safe file name
        lock = self._lock(header.version)
        try:
            with _converted(f"begin the upload of version {header.version}"):
                if self.header(header.version) != header:
                    # First the data: with its header but without data, a version is an upload at 0.
                    self._remove_data(header.version)
                    _write_durably(self._header_path(header.version), header.to_json())
                return StagedUpload(self, header, self._data_path(header), lock)
        except BaseException:
            os.close(lock)
            raise

    def header(self, version: int) -> UploadHeader | None:
        """The header of an upload under way; None if there is none, or none that can be read."""
        with _converted(f"read the upload of version {version}"):
            try:
                header = UploadHeader.from_json(self._header_path(version).read_bytes())
            except (FileNotFoundError, ValueError):
                return None
        return header if header.version == version else None

    def committed_bytes(self, version: int) -> int:
        """Bytes that an upload has so far, from which it goes on; 0 if there is none."""
        header = self.header(version)
        if header is None:
            return 0
        with _converted(f"read the upload of version {version}"):
            try:
                size = self._data_path(header).stat().st_size
            except FileNotFoundError:
                return 0
        return size if size <= header.size_bytes else 0

    def pending(self) -> list[UploadHeader]:
        """Headers of the uploads that were begun and neither finished nor discarded, by version."""
        with _converted("list the uploads"):
            names = sorted(os.listdir(self._directory))
        headers = (self.header(int(match[1])) for name in names if (match := _HEADER.fullmatch(name)))
        return [header for header in headers if header is not None]

    def discard(self, version: int) -> None:
        """Forget an upload, if there is one; UploadBusyError if it is open."""
        lock = self._lock(version)
        try:
            self._remove(version)
        finally:
            os.close(lock)

    def _lock(self, version: int) -> int:
        """A descriptor that holds the version's lock; a process that dies lets go of it."""
        path = self._lock_path(version)
        with _converted(f"lock the upload of version {version}"):
            while True:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise UploadBusyError(f"version {version} is being uploaded already") from None
                    # Whoever held it may have removed the file since it was opened here; that locks nothing.
                    with contextlib.suppress(FileNotFoundError):
                        if os.path.samestat(os.fstat(lock), os.stat(path)):
                            return lock
                except BaseException:
                    os.close(lock)
                    raise
                os.close(lock)

    def _remove(self, version: int) -> None:
        """Remove all of an upload whose lock is held; the lock last."""
        with _converted(f"discard the upload of version {version}"):
            self._header_path(version).unlink(missing_ok=True)
            _temporary(self._header_path(version)).unlink(missing_ok=True)
            self._remove_data(version)
            self._lock_path(version).unlink(missing_ok=True)

    def _remove_data(self, version: int) -> None:
        for path in self._directory.glob(f"{version:020d}.*.part"):
            path.unlink(missing_ok=True)

    def _header_path(self, version: int) -> Path:
        return self._directory / f"{version:020d}.json"

    def _lock_path(self, version: int) -> Path:
        return self._directory / f"{version:020d}.lock"

    def _data_path(self, header: UploadHeader) -> Path:
        return self._directory / f"{header.version:020d}.{header.sha256}.part"


class StagedUpload:
    """An open upload; see `Staging.open`. Closing it keeps what it has."""

    def __init__(self, staging: Staging, header: UploadHeader, path: Path, lock: int) -> None:
        self.header = header
        self._staging = staging
        self._path = path
        self._finished = False
        # Every append is a write at the end of the file, so whatever a killed process got written of it is a true
        # beginning of those bytes: a torn tail is not cut but continued. (Losing power can leave other bytes there;
        # the digest finds that.)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self.committed_bytes > header.size_bytes:
            os.ftruncate(self._file, 0)
        self._lock = lock

    @property
    def committed_bytes(self) -> int:
        """Bytes that the upload has: the offset of the next append."""
        return os.fstat(self._file).st_size

    def append(self, offset: int, data: bytes) -> None:
        """Append bytes; ValueError if they do not begin at `committed_bytes` or go beyond the size."""
        at = self.committed_bytes
        if offset != at:
            raise ValueError(f"offset must be {at}, the bytes received so far, not {offset}")
        if at + len(data) > self.header.size_bytes:
            raise ValueError(f"{len(data)} bytes at {offset} go beyond size_bytes={self.header.size_bytes}")
        rest = memoryview(data)
        with _converted(f"write the upload of version {self.header.version}"):
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def finish(self) -> Path:
        """Check that the file is complete, and bring it to the disk. Slow for large files.

        Returns:
            The file, which may be moved elsewhere before the upload is closed; then nothing is left of it here.
            TruncatedError if bytes are missing, ChecksumError if they are not those announced.
        """
        version, size = self.header.version, self.committed_bytes
        if size != self.header.size_bytes:
            raise TruncatedError(f"version {version} has {size} of {self.header.size_bytes} bytes")
        with _converted(f"finish the upload of version {version}"):
            os.fsync(self._file)
            _sync_directory(self._path.parent)
            digest = sha256_of(self._path)
        if digest != self.header.sha256:
            self.discard()
            raise ChecksumError(f"version {version} has the sha256 {digest} instead of {self.header.sha256}")
        self._finished = True
        return self._path

    def discard(self) -> None:
        """Forget the upload, and close it."""
        if self._lock >= 0:
            try:
                self._staging._remove(self.header.version)
            finally:
                self._close()

    def close(self) -> None:
        """Let others open the upload. What it has stays, unless it was finished and the file moved elsewhere."""
        if self._finished and not self._path.exists():
            self.discard()
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._file)
            os.close(self._lock)
            self._file = self._lock = -1

    def __enter__(self) -> StagedUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write_durably(path: Path, text: str) -> None:
    """Write a file whole or not at all; only one at a time may write it."""
    with _temporary(path).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(_temporary(path), path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _converted(what: str) -> Iterator[None]:
    """Errors of the system as StagingError: "cannot {what}: ..."."""
    try:
        yield
    except OSError as error:
        raise StagingError(f"cannot {what}: {error.strerror or error}") from error
