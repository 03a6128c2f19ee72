"""A policy store in a directory, and one in a bucket behind a real S3 endpoint."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from rollout_service.policy.store import PolicyRecord, PolicyStore

MakePolicy = Callable[..., tuple[PolicyRecord, Path]]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for every request
    one_put, put = threading.Lock(), S3Response._key_response_put

    def put_one(self: S3Response, *args: Any) -> Any:
        """moto looks for the object and writes it in two steps; what `If-None-Match: *` asks of S3 is one."""
        with one_put:
            return put(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "_key_response_put", put_one)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def directory_url(tmp_path: Path) -> str:
    return str(tmp_path / "a store")


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket; this process and its children can use it."""
    environment = {
        "AWS_ENDPOINT": s3_endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"policies-{time.monotonic_ns()}"
    request = urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    return f"s3://{bucket}/some/where"


@pytest.fixture(params=["directory", "s3"])
def store_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def store(store_url: str) -> PolicyStore:
    return PolicyStore.open(store_url)


@pytest.fixture
def other(store_url: str) -> PolicyStore:
    """The same store, opened once more."""
    return PolicyStore.open(store_url)


@pytest.fixture
def make_policy(tmp_path: Path) -> MakePolicy:
    """``make_policy(version, content, **fields)``: a file, and the record of it."""

    def make(version: int, content: bytes = b"weights", **fields: Any) -> tuple[PolicyRecord, Path]:
        digest = hashlib.sha256(content).hexdigest()
        file = tmp_path / f"made-{digest}"
        file.write_bytes(content)
        values: dict[str, Any] = {
            "version": version,
            "kind": "lora",
            "size_bytes": len(content),
            "sha256": digest,
            "lora_rank": 4,
            "lora_alpha": 8.0,
            "rank_pattern": {"blocks.0": 2},
            "alpha_pattern": {"blocks.0": 1.5},
            "bound_tensors": 6,
            "expected_tensors": 6,
            "create_time": time.time(),
        }
        return PolicyRecord(**(values | fields)), file

    return make
