"""The policy store, in a directory and behind the S3 protocol: what it keeps, races, damage, and killed writers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import obstore
import pytest

from rollout_service.policy import store as store_module
from rollout_service.policy.staging import Staging
from rollout_service.policy.store import (
    ACTIVATIONS_KEPT,
    NO_ACTIVATION,
    Activation,
    ActivationConflictError,
    PolicyRecord,
    PolicyStore,
    PolicyStoreError,
    VersionExistsError,
    VersionMissingError,
)
from tests.policy.conftest import MakePolicy

MIB = 1 << 20


async def content_of(store: PolicyStore, record: PolicyRecord, directory: Path) -> bytes:
    target = directory / "fetched"
    await store.fetch(record, target)
    return target.read_bytes()


async def objects(store: PolicyStore) -> set[str]:
    return {meta["path"] for meta in await obstore.list(store._store).collect_async()}


async def put(store: PolicyStore, path: str, content: bytes = b"{}") -> None:
    await obstore.put_async(store._store, path, content)


def data_path(record: PolicyRecord) -> str:
    return f"versions/{record.version:020d}/{record.sha256}.safetensors"


async def test_versions_come_and_go(
    store: PolicyStore, other: PolicyStore, make_policy: MakePolicy, tmp_path: Path
) -> None:
    assert await store.list() == []
    assert await store.highest() == 0
    large = random.Random(0).randbytes(9 * MIB + 1)  # more than a part
    contents = {3: b"three", 20: large, 100: b""}
    added = {}
    for version, content in contents.items():
        record, file = make_policy(version, content)
        added[version] = await store.add(record, file)
        assert added[version] == record == await other.get(version)
    assert [record.version for record in await other.list()] == [100, 20, 3]
    for version, content in contents.items():
        assert await content_of(other, added[version], tmp_path) == content
    await other.delete(100)
    assert [record.version for record in await store.list()] == [20, 3]
    assert await store.highest() == 100
    with pytest.raises(VersionMissingError, match=r"100: it was deleted"):
        await store.get(100)
    with pytest.raises(VersionMissingError, match="100"):
        await store.fetch(added[100], tmp_path / "gone")
    with pytest.raises(VersionMissingError, match=r"no policy version 7$"):
        await store.get(7)
    with pytest.raises(VersionMissingError, match="no policy version 7"):
        await store.delete(7)
    assert not list(tmp_path.glob("*gone*"))
    assert {path for path in await objects(store) if "100" in path} == {f"versions/{100:020d}.deleted"}


async def test_adding_again_returns_what_is_stored(store: PolicyStore, make_policy: MakePolicy) -> None:
    record, file = make_policy(1)
    stored = await store.add(record, file)
    assert await store.add(dataclasses.replace(record, create_time=record.create_time + 9), file) == stored


@pytest.mark.parametrize("change", [{"content": b"other"}, {"lora_alpha": 9.0}, {"kind": "full"}], ids=str)
async def test_other_content_is_refused(
    change: dict[str, Any], store: PolicyStore, make_policy: MakePolicy, tmp_path: Path
) -> None:
    record, file = make_policy(1)
    await store.add(record, file)
    with pytest.raises(VersionExistsError, match="version 1 exists with other content"):
        await store.add(*make_policy(1, **change))
    assert await store.get(1) == record
    assert await content_of(store, record, tmp_path) == b"weights"
    assert len(await objects(store)) == 2


async def test_a_deleted_version_stays_deleted(store: PolicyStore, make_policy: MakePolicy) -> None:
    await store.add(*make_policy(1))
    await store.delete(1)
    with pytest.raises(VersionExistsError, match="version 1 was deleted"):
        await store.add(*make_policy(1))
    # A delete that was cut short after its first step is completed by the next one.
    record, file = make_policy(2)
    await store.add(record, file)
    await put(store, f"versions/{2:020d}.deleted")
    assert await store.list() == []
    await store.delete(2)
    assert await objects(store) == {f"versions/{version:020d}.deleted" for version in (1, 2)}


@pytest.mark.parametrize("fields", [{"sha256": "0" * 64}, {"size_bytes": 3}], ids=str)
async def test_a_file_unlike_its_record_is_not_added(
    fields: dict[str, Any], store: PolicyStore, make_policy: MakePolicy
) -> None:
    with pytest.raises(PolicyStoreError, match="version 1 differs from its record"):
        await store.add(*make_policy(1, **fields))
    with pytest.raises(PolicyStoreError, match="cannot read nothing"):
        await store.add(make_policy(1)[0], Path("nothing"))
    assert await objects(store) == set()


async def test_of_two_adds_at_once_one_wins(
    store: PolicyStore, other: PolicyStore, make_policy: MakePolicy, tmp_path: Path
) -> None:
    for version in range(1, 4):
        policies = [make_policy(version, name * 100_000) for name in (b"a", b"b")]
        results = await asyncio.gather(store.add(*policies[0]), other.add(*policies[1]), return_exceptions=True)
        (winner,) = [one for one in results if isinstance(one, PolicyRecord)]
        (loser,) = [one for one in results if not isinstance(one, PolicyRecord)]
        assert isinstance(loser, VersionExistsError)
        assert await store.get(version) == winner == policies[results.index(winner)][0]
        assert hashlib.sha256(await content_of(store, winner, tmp_path)).hexdigest() == winner.sha256
        # Nothing is left of the loser.
        assert {path for path in await objects(store) if f"{version:020d}/" in path} == {data_path(winner)}


async def test_two_adds_of_the_same_at_once_both_succeed(
    store: PolicyStore, other: PolicyStore, make_policy: MakePolicy, tmp_path: Path
) -> None:
    record, file = make_policy(1, b"same" * 100_000)
    later = dataclasses.replace(record, create_time=record.create_time + 1)
    first, second = await asyncio.gather(store.add(record, file), other.add(later, file))
    assert first == second == await store.get(1)
    assert await content_of(store, first, tmp_path) == file.read_bytes()


async def test_an_add_that_a_delete_overtakes_leaves_nothing(
    store: PolicyStore, other: PolicyStore, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, upload = make_policy(1), store._upload

    async def slow_upload(*args: Any) -> None:
        await upload(*args)
        await other.add(*policy)
        await other.delete(1)
        await upload(*args)

    monkeypatch.setattr(store, "_upload", slow_upload)
    with pytest.raises(VersionExistsError, match="deleted"):
        await store.add(*policy)
    assert await objects(store) == {f"versions/{1:020d}.deleted"}


async def test_an_add_whose_data_was_swept_writes_it_again(
    store: PolicyStore, other: PolicyStore, make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = store._commit

    async def late_commit(record: PolicyRecord) -> PolicyRecord:
        assert await other.sweep(0) == 1
        return await commit(record)

    monkeypatch.setattr(store, "_commit", late_commit)
    record = await store.add(*make_policy(1))
    assert await content_of(other, record, tmp_path) == b"weights"


async def test_activations(store: PolicyStore, other: PolicyStore, make_policy: MakePolicy) -> None:
    assert await store.current() == NO_ACTIVATION == Activation(0, 0, "new_rollouts")
    with pytest.raises(VersionMissingError):
        await store.activate(5, "abort", NO_ACTIVATION)
    with pytest.raises(ValueError, match="mode must be one of"):
        await store.activate(0, "later", NO_ACTIVATION)  # pyright: ignore[reportArgumentType]
    await store.add(*make_policy(5))
    first = await store.activate(5, "next_step", NO_ACTIVATION)
    assert first == Activation(1, 5, "next_step") == await other.current()
    second = await other.activate(0, "abort", first)
    assert second == Activation(2, 0, "abort") == await store.current()
    for after in (NO_ACTIVATION, first, Activation(3, 5, "abort"), Activation(2, 5, "abort")):
        with pytest.raises(ActivationConflictError, match="sequence 2") as caught:
            await store.activate(5, "abort", after)
        assert caught.value.current == second


async def test_of_activations_at_once_one_wins(store_url: str, make_policy: MakePolicy) -> None:
    stores = [PolicyStore.open(store_url) for _ in range(8)]
    await stores[0].add(*make_policy(1))
    after = NO_ACTIVATION
    for _ in range(2):
        # Half of them ask for the very same; still only one has made it current.
        results = await asyncio.gather(
            *(one.activate(i % 2, "abort", after) for i, one in enumerate(stores)), return_exceptions=True
        )
        (winner,) = [one for one in results if isinstance(one, Activation)]
        losers = [one for one in results if isinstance(one, ActivationConflictError)]
        assert [one.current for one in losers] == [winner] * 7
        assert await stores[0].current() == winner == Activation(after.sequence + 1, results.index(winner) % 2, "abort")
        after = winner


async def test_an_activation_whose_answer_was_lost_is_recognised(
    store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = store._create

    async def create_twice(*args: Any) -> bool:
        assert await create(*args)
        return await create(*args)

    monkeypatch.setattr(store, "_create", create_twice)
    assert await store.activate(0, "abort", NO_ACTIVATION) == Activation(1, 0, "abort") == await store.current()


@pytest.mark.parametrize("damaged", [b"weighty", b"weight", b"weights!", b"", None])
async def test_damaged_data_is_not_fetched(
    damaged: bytes | None, store: PolicyStore, make_policy: MakePolicy, tmp_path: Path
) -> None:
    record = await store.add(*make_policy(1))
    if damaged is None:
        await obstore.delete_async(store._store, data_path(record))
    else:
        await put(store, data_path(record), damaged)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(PolicyStoreError, match="version 1"):
        await store.fetch(record, into / "policy")
    assert list(into.iterdir()) == []


async def test_fetch_keeps_what_was_there_unless_it_succeeds(
    store: PolicyStore, make_policy: MakePolicy, tmp_path: Path
) -> None:
    record = await store.add(*make_policy(1))
    target = tmp_path / "target"
    target.write_bytes(b"before")
    with pytest.raises(PolicyStoreError, match="differs"):
        await store.fetch(dataclasses.replace(record, size_bytes=8), target)
    assert target.read_bytes() == b"before"
    await store.fetch(record, target)
    assert target.read_bytes() == b"weights"
    with pytest.raises(PolicyStoreError, match="cannot read the data"):
        await store.fetch(record, tmp_path / "missing" / "target")


async def test_a_cancelled_fetch_leaves_no_file(
    store: PolicyStore, make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await store.add(*make_policy(1, bytes(1_000_000)))
    monkeypatch.setattr(store_module, "_PART_BYTES", 1000)
    into = tmp_path / "into"
    into.mkdir()
    fetching = asyncio.create_task(store.fetch(record, into / "policy"))
    while not any(file.stat().st_size for file in into.iterdir()):
        await asyncio.sleep(0.001)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert list(into.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}", b"[" * 100_000, b'{"version": 2}'])
async def test_what_is_broken_is_named(content: bytes, store: PolicyStore, make_policy: MakePolicy) -> None:
    await store.add(*make_policy(1))
    await put(store, f"versions/{2:020d}.json", content)
    for call in (store.list(), store.get(2), store.add(*make_policy(2))):
        with pytest.raises(PolicyStoreError, match=rf"versions/{2:020d}\.json in .* is broken"):
            await call
    assert (await store.get(1)).version == 1
    assert await store.highest() == 2
    await store.sweep(0)
    await store.delete(2)  # which is the way to get rid of it
    assert [record.version for record in await store.list()] == [1]
    await put(store, f"activations/{1:020d}.json", content)
    with pytest.raises(PolicyStoreError, match=rf"activations/{1:020d}\.json in .* is broken"):
        await store.current()


async def test_a_record_of_another_version_is_broken(store: PolicyStore, make_policy: MakePolicy) -> None:
    await put(store, f"versions/{2:020d}.json", make_policy(3)[0].to_json().encode())
    with pytest.raises(PolicyStoreError, match="broken: it says version 3"):
        await store.get(2)


def test_records_in_json(make_policy: MakePolicy) -> None:
    record, _ = make_policy(2**63 - 1)
    assert PolicyRecord.from_json(record.to_json()) == record
    full, _ = make_policy(1, kind="full", lora_rank=None, lora_alpha=None, rank_pattern={}, alpha_pattern={})
    assert PolicyRecord.from_json(full.to_json()) == full
    assert type(PolicyRecord.from_json(record.to_json().replace("8.0", "8")).lora_alpha) is float


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 0), ("version", -1), ("version", True), ("version", 1.0), ("version", "1"), ("version", 2**63),
        ("kind", "LORA"), ("kind", None), ("kind", []), ("size_bytes", -1), ("size_bytes", None),
        ("sha256", "0" * 63), ("sha256", "F" * 64), ("sha256", "0" * 64 + "\n"), ("sha256", "../" * 21 + "0"),
        ("lora_rank", 0), ("lora_rank", 1.5), ("lora_rank", False), ("lora_alpha", "1"), ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")), ("lora_alpha", 10**400), ("rank_pattern", None), ("rank_pattern", []),
        ("rank_pattern", {"a": 1.0}), ("alpha_pattern", {"a": None}), ("alpha_pattern", {"a": True}),
        ("bound_tensors", -1), ("expected_tensors", "6"), ("create_time", None), ("unknown", 1),
    ],
)  # fmt: skip
def test_bad_records_are_refused(field: str, value: Any, make_policy: MakePolicy) -> None:
    fields = dataclasses.asdict(make_policy(1)[0])
    with pytest.raises(ValueError, match=field):
        PolicyRecord.from_json(json.dumps(fields | {field: value}))
    if field != "unknown":
        del fields[field]
        with pytest.raises(ValueError, match=f"instead of .*{field}"):
            PolicyRecord.from_json(json.dumps(fields))


async def test_sweep_removes_what_nothing_uses(store: PolicyStore, make_policy: MakePolicy, tmp_path: Path) -> None:
    live = await store.add(*make_policy(1))
    await put(store, f"versions/{1:020d}/{'a' * 64}.safetensors")  # of an add that lost and died
    await put(store, f"versions/{2:020d}/{'b' * 64}.safetensors")  # of an add that died
    half_deleted = await store.add(*make_policy(3))
    await put(store, f"versions/{3:020d}.deleted")
    after = NO_ACTIVATION
    for _ in range(ACTIVATIONS_KEPT + 3):
        after = await store.activate(1, "abort", after)
    before = await objects(store)
    assert await store.sweep() == 2
    assert before - await objects(store) == {f"versions/{3:020d}.json", data_path(half_deleted)}
    assert await store.sweep(0) == 2 + 3
    assert await objects(store) == {
        f"versions/{1:020d}.json",
        data_path(live),
        f"versions/{3:020d}.deleted",
        *(f"activations/{sequence:020d}.json" for sequence in range(4, ACTIVATIONS_KEPT + 4)),
    }
    assert await store.sweep(0) == 0
    assert await store.current() == after
    assert await content_of(store, live, tmp_path) == b"weights"
    # The sequence number after a swept activation is free, but not to be had.
    with pytest.raises(ActivationConflictError):
        await store.activate(1, "abort", Activation(2, 1, "abort"))


async def test_what_is_not_ours_is_left_alone(store: PolicyStore, make_policy: MakePolicy) -> None:
    record = await store.add(*make_policy(1))
    strangers = {"readme", "versions/notes.json", "versions/7.json", "versions/x/y", "activations/x.json"}
    for path in strangers:
        await put(store, path)
    assert await store.list() == [record]
    assert (await store.highest(), await store.current(), await store.sweep(0)) == (1, NO_ACTIVATION, 0)
    assert strangers < await objects(store)


@pytest.mark.parametrize("url", ["bogus://x", "s3://", "", "http://127.0.0.1:1/x", "file", "file/below"])
def test_what_cannot_be_a_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PolicyStoreError, match=re.escape(f"cannot open the policy store {url}: ")):
        PolicyStore.open(url)


async def test_a_file_url_is_a_directory(tmp_path: Path, make_policy: MakePolicy) -> None:
    record = await PolicyStore.open(f"file://{tmp_path}/new").add(*make_policy(1))
    assert await PolicyStore.open(str(tmp_path / "new")).list() == [record]


async def test_a_store_out_of_reach(
    s3_url: str, make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = PolicyStore.open("s3://no-such-bucket")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setitem(store_module._RETRY, "max_retries", 0)
        record, file = make_policy(1)
        for store in (missing, PolicyStore.open(s3_url)):
            for call in (
                store.list(),
                store.highest(),
                store.add(record, file),
                store.fetch(record, tmp_path / "target"),
                store.current(),
                store.activate(0, "abort", NO_ACTIVATION),
                store.sweep(),
            ):
                with pytest.raises(PolicyStoreError, match=r"^cannot [^\n]*$") as caught:
                    await call
                assert "secret" not in str(caught.value)


@pytest.mark.slow
async def test_many_workers_at_once(store_url: str, make_policy: MakePolicy, tmp_path: Path) -> None:
    """Every operation against every other, on few versions: none fails but for the reasons that it states."""
    policies = [make_policy(1, byte * size) for byte in (b"a", b"b") for size in (10, 9 * MIB)]

    async def work(worker: int) -> None:
        store, choice = PolicyStore.open(store_url), random.Random(worker)
        for step in range(60):
            version = step // 4 + choice.randrange(1, 4)
            with contextlib.suppress(VersionExistsError, VersionMissingError, ActivationConflictError):
                match choice.choice(["add", "add", "delete", "fetch", "list", "sweep", "activate"]):
                    case "add":
                        record, file = choice.choice(policies)
                        await store.add(dataclasses.replace(record, version=version), file)
                    case "delete":
                        await store.delete(version)
                    case "fetch":
                        for record in (await store.list())[:2]:
                            await store.fetch(record, tmp_path / f"fetched-{worker}")
                    case "list":
                        records = await store.list()
                        assert await store.highest() >= max([0, *(record.version for record in records)])
                    case "sweep":
                        await store.sweep(60)
                    case "activate":
                        await store.activate(version, "abort", await store.current())

    await asyncio.gather(*(work(worker) for worker in range(6)))
    store = PolicyStore.open(store_url)
    await store.sweep(0)
    records = await store.list()
    for record in records:
        await store.fetch(record, tmp_path / "fetched")
    left = {path for path in await objects(store) if path.startswith("versions/") and not path.endswith(".deleted")}
    assert left == {f"versions/{one.version:020d}.json" for one in records} | {data_path(one) for one in records}


ADDING = """
import asyncio, sys
from pathlib import Path
from rollout_service.policy.store import PolicyRecord, PolicyStore
asyncio.run(PolicyStore.open(sys.argv[1]).add(PolicyRecord.from_json(sys.argv[2]), Path(sys.argv[3])))
"""


async def test_nothing_partial_is_ever_visible(directory_url: str, make_policy: MakePolicy, tmp_path: Path) -> None:
    store = PolicyStore.open(directory_url)
    record, file = make_policy(1, bytes(64 * MIB))
    child = subprocess.Popen([sys.executable, "-c", ADDING, directory_url, record.to_json(), str(file)])

    def under_way() -> bool:
        return bool(list(Path(directory_url).glob("versions/*/*#*")))

    while not under_way():
        assert child.poll() is None
    child.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.01)
    assert under_way()
    assert await store.list() == []
    assert await store.highest() == 0
    child.send_signal(signal.SIGCONT)
    while not (records := await store.list()):
        assert child.poll() in (None, 0)
    assert records == [record]
    await store.fetch(record, tmp_path / "target")
    assert await asyncio.to_thread(child.wait) == 0


STALLING = """
import asyncio, sys
import obstore
from obstore.store import LocalStore

async def parts():
    yield bytes(6_000_000)
    await asyncio.sleep(600)

async def main():
    await obstore.put_async(LocalStore(sys.argv[1]), sys.argv[2], parts())

asyncio.run(main())
"""


async def test_sweep_removes_what_killed_writers_left_in_a_directory(
    directory_url: str, make_policy: MakePolicy
) -> None:
    store = PolicyStore.open(directory_url)
    root = Path(directory_url)
    child = subprocess.Popen([sys.executable, "-c", STALLING, directory_url, data_path(make_policy(1)[0])])
    while not list(root.glob("versions/*/*#*")):
        await asyncio.sleep(0.001)
        assert child.poll() is None
    child.kill()
    child.wait()
    (root / "activations").mkdir()
    (root / f"activations/{1:020d}.json#12").touch()
    assert await store.list() == []
    assert await store.highest() == 0
    assert await store.sweep() == 0
    assert await store.sweep(0) == 2
    assert [path for path in root.rglob("*") if not path.is_dir()] == []


LOOPING = """
import asyncio, contextlib, dataclasses, hashlib, random, sys, time
from pathlib import Path
from rollout_service.policy.staging import Staging, UploadHeader
from rollout_service.policy.store import NO_ACTIVATION, PolicyRecord, PolicyStore

def content(version):
    source = random.Random(version)
    return source.randbytes(source.randrange(3_000_000))

def upload(staging, header):
    data = content(header.version)
    with staging.open(header) as upload:
        while (at := upload.committed_bytes) < len(data):
            upload.append(at, data[at : at + random.randrange(1, 120_000)])
            time.sleep(0.001)  # the next bytes arrive
        return upload.finish()

async def main():
    store, staging = PolicyStore.open(sys.argv[1]), Staging(Path(sys.argv[2]))
    choice = random.Random(int(sys.argv[3]))
    print("ready", flush=True)
    while True:
        pending = staging.pending()
        if pending:
            header = pending[0]
        else:
            version = await store.highest() + 1
            data = content(version)
            header = UploadHeader(version, "full", len(data), hashlib.sha256(data).hexdigest(), None, None, {}, {})
        file = upload(staging, header)
        record = PolicyRecord(**dataclasses.asdict(header), bound_tensors=1, expected_tensors=1, create_time=1.0)
        await store.add(record, file)
        staging.discard(header.version)
        await store.activate(header.version, "abort", await store.current())
        versions = [record.version for record in await store.list()]
        while len(versions) > 3:
            await store.delete(versions.pop(choice.randrange(len(versions))))
        if choice.random() < 0.2:
            await store.sweep(0)

asyncio.run(main())
"""


def policy_bytes(version: int) -> bytes:
    source = random.Random(version)
    return source.randbytes(source.randrange(3_000_000))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("where", "kills"), [("directory", 50), ("s3", 15)])
async def test_killed_at_any_moment(where: str, kills: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url, chance = request.getfixturevalue(f"{where}_url"), random.Random(0)
    store, staging = PolicyStore.open(url), Staging(tmp_path / "staging")
    target = tmp_path / "target"
    cut_short = 0
    for kill in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOPING, url, str(tmp_path / "staging"), str(kill)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        await asyncio.sleep(chance.uniform(0, 0.4))
        assert child.poll() is None
        child.kill()
        child.wait()
        child.stdout.close()

        listed = await store.list()
        for record in listed:
            await store.fetch(record, target)
            assert target.read_bytes() == policy_bytes(record.version)
        active = (await store.current()).version
        if active not in {0, *(record.version for record in listed)}:
            with pytest.raises(VersionMissingError, match="was deleted"):
                await store.get(active)
        for header in staging.pending():
            data, at = policy_bytes(header.version), staging.committed_bytes(header.version)
            files = [file.read_bytes() for file in (tmp_path / "staging").glob(f"{header.version:020d}.*.part")]
            assert files in ([], [data[:at]])
            cut_short += 0 < at < len(data)
            if chance.random() < 0.5:
                continue  # the next child goes on with it
            with staging.open(header) as upload:
                assert upload.committed_bytes == at
                upload.append(at, data[at:])
                assert hashlib.sha256(upload.finish().read_bytes()).hexdigest() == header.sha256
    assert await store.highest() > kills / 2
    assert cut_short > 0 or where == "s3"  # where most of the time goes elsewhere
    await store.sweep(0)
    records = await store.list()
    live = {f"versions/{record.version:020d}.json" for record in records} | {data_path(record) for record in records}
    left = await objects(store)
    if where == "directory":
        left = {os.path.relpath(path, url) for path in Path(url).rglob("*") if not path.is_dir()}
    assert {path for path in left if path.startswith("versions/") and not path.endswith(".deleted")} == live
    assert len([path for path in left if path.startswith("activations/")]) <= ACTIVATIONS_KEPT
