"""Uploads under way: resuming, what is refused, damage, and processes that die."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_service.policy.staging import (
    ChecksumError,
    StagedUpload,
    Staging,
    StagingError,
    TruncatedError,
    UploadBusyError,
    UploadHeader,
)

DATA = random.Random(0).randbytes(100_000)


def header_of(data: bytes = DATA, version: int = 1, **fields: Any) -> UploadHeader:
    values: dict[str, Any] = {
        "version": version,
        "kind": "lora",
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "rank_pattern": {"blocks.0": 2},
        "alpha_pattern": {},
    }
    return UploadHeader(**(values | fields))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "some" / "where"


@pytest.fixture
def staging(directory: Path) -> Staging:
    return Staging(directory)


def append_all(upload: StagedUpload, data: bytes, step: int = 30_000) -> None:
    while (at := upload.committed_bytes) < len(data):
        upload.append(at, data[at : at + step])


@pytest.mark.parametrize("data", [DATA, b"1", b""], ids=len)
def test_an_upload(data: bytes, staging: Staging, directory: Path, tmp_path: Path) -> None:
    header = header_of(data)
    assert (staging.header(1), staging.committed_bytes(1), staging.pending()) == (None, 0, [])
    with staging.open(header) as upload:
        assert staging.pending() == [header]
        append_all(upload, data)
        assert upload.committed_bytes == staging.committed_bytes(1) == len(data)
        os.replace(upload.finish(), tmp_path / "policy")
    assert (tmp_path / "policy").read_bytes() == data
    # It was taken away, so that nothing is left of it.
    assert list(directory.iterdir()) == []
    assert staging.pending() == []


def test_an_upload_goes_on_where_it_was(staging: Staging, directory: Path) -> None:
    header = header_of()
    for at in range(0, len(DATA), 10_000):
        again = Staging(directory)
        assert again.committed_bytes(1) == at
        with again.open(header) as upload:
            assert upload.committed_bytes == at
            upload.append(at, DATA[at : at + 10_000])
    with staging.open(header) as upload:
        assert upload.finish().read_bytes() == DATA
    # A finished upload that was not taken away stays, and can be finished again.
    assert staging.pending() == [header]
    with staging.open(header) as upload:
        upload.finish()
        upload.discard()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"lora_alpha": 9.0}, {"kind": "full"}, {"sha256": "0" * 64}, {"size_bytes": 99}, {"rank_pattern": {}}],
    ids=str,
)
def test_another_header_begins_anew(changes: dict[str, Any], staging: Staging, directory: Path) -> None:
    with staging.open(header_of()) as upload:
        append_all(upload, DATA)
    changed = dataclasses.replace(header_of(), **changes)
    with staging.open(changed) as upload:
        assert upload.committed_bytes == staging.committed_bytes(1) == 0
    assert staging.header(1) == changed
    assert len(list(directory.iterdir())) == 3
    with staging.open(header_of()) as upload:
        assert upload.committed_bytes == 0


def test_appends_that_do_not_fit_are_refused(staging: Staging) -> None:
    with staging.open(header_of()) as upload:
        upload.append(0, DATA[:10])
        for offset in (0, 9, 11, -1):
            with pytest.raises(ValueError, match=f"offset must be 10, .* not {offset}"):
                upload.append(offset, b"x")
        with pytest.raises(ValueError, match="beyond size_bytes=100000"):
            upload.append(10, DATA)
        assert upload.committed_bytes == 10
        upload.append(10, b"")
        append_all(upload, DATA)
        with pytest.raises(ValueError, match="beyond"):
            upload.append(len(DATA), b"x")
        assert upload.finish().read_bytes() == DATA


def test_a_truncated_upload_can_go_on(staging: Staging) -> None:
    with staging.open(header_of()) as upload:
        upload.append(0, DATA[:-1])
        with pytest.raises(TruncatedError, match="version 1 has 99999 of 100000 bytes"):
            upload.finish()
        upload.append(len(DATA) - 1, DATA[-1:])
        assert upload.finish().read_bytes() == DATA


def test_other_bytes_are_discarded(staging: Staging, directory: Path) -> None:
    with staging.open(header_of()) as upload:
        append_all(upload, DATA[:-1] + b"\0")
        with pytest.raises(ChecksumError, match="version 1 has the sha256"):
            upload.finish()
    assert list(directory.iterdir()) == []
    with staging.open(header_of()) as upload:
        assert upload.committed_bytes == 0


def test_versions_are_apart(staging: Staging) -> None:
    headers = [header_of(version=version) for version in (2**63 - 1, 10, 9)]
    uploads = [staging.open(header) for header in headers]
    for upload in uploads:
        upload.append(0, DATA[: upload.header.version % 1000])
    assert staging.pending() == headers[::-1]
    assert [staging.committed_bytes(header.version) for header in headers] == [807, 10, 9]
    uploads[1].discard()
    assert staging.pending() == [headers[2], headers[0]]
    for upload in uploads:
        upload.close()
        upload.close()
        upload.discard()
    assert staging.pending() == [headers[2], headers[0]]


def test_one_upload_of_a_version_at_a_time(staging: Staging, directory: Path) -> None:
    with staging.open(header_of()) as upload:
        upload.append(0, DATA[:10])
        for header in (header_of(), header_of(b"other")):
            with pytest.raises(UploadBusyError, match="version 1"):
                Staging(directory).open(header)
        with pytest.raises(UploadBusyError, match="version 1"):
            staging.discard(1)
        assert (staging.header(1), staging.committed_bytes(1)) == (header_of(), 10)
    staging.discard(1)
    staging.discard(1)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0}, {"version": -1}, {"version": "../x"}, {"version": 2**63}, {"sha256": "../" * 21 + "x"},
        {"sha256": "0" * 63}, {"kind": "../full"}, {"size_bytes": -1}, {"lora_rank": 0}, {"lora_alpha": float("nan")},
        {"rank_pattern": {"a": 0}}, {"alpha_pattern": {"a": "1"}},
    ],
    ids=str,
)  # fmt: skip
def test_unsound_headers_are_refused(changes: dict[str, Any], staging: Staging, directory: Path) -> None:
    with pytest.raises(ValueError, match=f"bad {next(iter(changes))}"):
        staging.open(header_of(**changes))
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", header_of(version=2).to_json().encode()])
def test_an_upload_whose_header_is_broken_begins_anew(content: bytes, staging: Staging, directory: Path) -> None:
    with staging.open(header_of()) as upload:
        append_all(upload, DATA)
    (directory / f"{1:020d}.json").write_bytes(content)
    assert (staging.header(1), staging.committed_bytes(1), staging.pending()) == (None, 0, [])
    with staging.open(header_of()) as upload:
        assert upload.committed_bytes == 0


def test_more_bytes_than_announced_are_not_taken_for_an_upload(staging: Staging, directory: Path) -> None:
    staging.open(header_of()).close()
    (directory / f"{1:020d}.{header_of().sha256}.part").write_bytes(DATA + b"x")
    assert staging.committed_bytes(1) == 0
    with staging.open(header_of()) as upload:
        assert upload.committed_bytes == 0


UPLOADING = """
import resource, signal, sys
from pathlib import Path
from rollout_service.policy.staging import Staging, UploadHeader
upload = Staging(Path(sys.argv[1])).open(UploadHeader.from_json(sys.argv[2]))
data = Path(sys.argv[3]).read_bytes()
step = int(sys.argv[4])
if len(sys.argv) > 5:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[5]), int(sys.argv[5])))
try:
    while (at := upload.committed_bytes) < len(data):
        upload.append(at, data[at : at + step])
        print(at + step, flush=True)
    sys.stdin.read()
except Exception as error:
    print(upload.committed_bytes, repr(error))
"""

Uploader = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def uploader(directory: Path, tmp_path: Path) -> Uploader:
    """``uploader(step)``: a process that uploads DATA in appends of `step` bytes and then keeps the upload.

    ``uploader(step, limit)``: one that cannot write files of more than `limit` bytes.
    """
    (tmp_path / "data").write_bytes(DATA)

    def start(*numbers: int) -> subprocess.Popen[str]:
        arguments = [str(directory), header_of().to_json(), str(tmp_path / "data"), *map(str, numbers)]
        command = [sys.executable, "-c", UPLOADING, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return start


def test_a_killed_process_lets_go_and_its_bytes_stay(staging: Staging, uploader: Uploader) -> None:
    with uploader(10) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "10\n"
        with pytest.raises(UploadBusyError):
            staging.open(header_of())
        child.kill()
    with staging.open(header_of()) as upload:
        assert 0 < upload.committed_bytes <= len(DATA)
        append_all(upload, DATA)
        assert upload.finish().read_bytes() == DATA


def test_an_append_that_fails_midway_counts_as_far_as_it_got(staging: Staging, uploader: Uploader) -> None:
    with uploader(30_000, 50_000) as child:
        output, _ = child.communicate(timeout=60)
    assert output.splitlines()[0] == "30000"
    assert output.splitlines()[1].startswith("50000 StagingError('cannot write the upload of version 1: File too large")
    with staging.open(header_of()) as upload:
        assert upload.committed_bytes == 50_000
        append_all(upload, DATA)
        assert upload.finish().read_bytes() == DATA


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StagingError, match="cannot make the staging directory"):
        Staging(tmp_path / "file" / "below")
    staging = Staging(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (staging.pending, lambda: staging.open(header_of())):
        with pytest.raises(StagingError, match="No such file"):
            call()
