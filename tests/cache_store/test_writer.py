from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store import backend as backend_module
from cache_store import parquet_shard, tar_shard
from cache_store.audit import verify_cache
from cache_store.errors import AlreadyExists, NotFound, SampleRejected, StorageError
from cache_store.ledger import Ledger, seal
from cache_store.reader import CacheReader
from cache_store.schema import CacheSpec
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache, load_spec
from tests.cache_store.samples import build_cache, make_sample, make_spec

pytestmark = pytest.mark.usefixtures("both_formats")

NAN, INFINITY = 0x7FC1, 0xFF80


class Crash(BaseException):
    """Stands for the death of the process: no handler of errors may catch it and go on."""


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "cache"))


def with_bits(array: np.ndarray, index: tuple[int, ...], value: int) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


SPEC = make_spec()
GOOD = make_sample(SPEC, 0, tokens=8)
BAD_SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"sample_id": ""}, "sample_id is empty"),
    ({"input_ids": GOOD.input_ids[:0]}, "no tokens"),
    ({"input_ids": GOOD.input_ids.astype(np.int64)}, r"input_ids is int64 \[8\], wanted int32 \[8\]"),
    ({"input_ids": GOOD.input_ids + 100}, "outside the vocabulary of 100"),
    ({"input_ids": GOOD.input_ids - 200}, "token id -"),
    ({"loss_mask": GOOD.loss_mask[:-1]}, r"loss_mask is bool \[7\], wanted bool \[8\]"),
    ({"loss_mask": np.zeros(8, bool)}, "none of its 8 tokens is supervised"),
    ({"hidden_states": GOOD.hidden_states[:, :-1]}, r"hidden_states is uint16 \[2, 7, 16\], wanted .*\[2, 8, 16\]"),
    ({"hidden_states": GOOD.hidden_states[:1]}, r"\[1, 8, 16\]"),
    ({"hidden_states": GOOD.hidden_states.astype(np.float32)}, "float32"),
    ({"last_hidden_state": GOOD.last_hidden_state[:, :-1]}, r"last_hidden_state is uint16 \[8, 15\]"),
    ({"hidden_states": with_bits(GOOD.hidden_states, (1, 7, 3), NAN)}, "hidden_states has 1 infinite or NaN"),
    ({"last_hidden_state": with_bits(GOOD.last_hidden_state, (5, 3), INFINITY)}, "last_hidden_state has 1 infinite"),
    ({"metadata": {"x": object()}}, "metadata is not JSON"),
    ({"metadata": {"x": float("nan")}}, "metadata is not JSON"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SAMPLES)
def test_bad_sample_is_rejected_and_the_writer_goes_on(storage: Storage, changes: dict[str, Any], message: str) -> None:
    create_cache(storage, SPEC)
    with CacheWriter(storage, SPEC) as writer:
        writer.write(make_sample(SPEC, 1))
        with pytest.raises(SampleRejected, match=message) as caught:
            writer.write(make_sample(SPEC, 0, tokens=8, **changes))
        assert caught.value.sample_id == changes.get("sample_id", "s0000")
        writer.write(make_sample(SPEC, 2))
    assert Ledger(storage).committed_ids() == {"s0001", "s0002"}


def test_same_id_twice_is_rejected(storage: Storage) -> None:
    with CacheWriter(storage, SPEC) as writer:
        writer.write(GOOD)
        with pytest.raises(SampleRejected, match="same sample_id before"):
            writer.write(GOOD)


def test_shards_roll_at_their_size(storage: Storage) -> None:
    spec = make_spec(shard_bytes=4000)
    build_cache(storage, spec, 20, sealed=False)
    sizes = [record.num_bytes for record in Ledger(storage).records()]
    assert len(sizes) > 3
    # A shard closes at the first sample that reaches the limit, so all but the tail are at least that large.
    assert sum(size < spec.shard_bytes for size in sizes) <= 1


def test_empty_writer_commits_nothing(storage: Storage) -> None:
    with CacheWriter(storage, SPEC) as writer:
        pass
    assert writer.close() == []
    assert storage.list("") == []


def test_exception_discards_the_open_shard_only(storage: Storage) -> None:
    spec = make_spec(shard_bytes=9000)
    create_cache(storage, spec)
    writer = CacheWriter(storage, spec)

    def write_until_error() -> None:
        with writer:
            for number in range(100):
                if len(writer.committed) >= 2 and writer._open is not None:
                    raise RuntimeError("row 5")
                writer.write(make_sample(spec, number))

    with pytest.raises(RuntimeError, match="row 5"):
        write_until_error()
    committed = {sample.sample_id for record in writer.committed for sample in record.samples}
    assert len(storage.list("shards/")) == len(storage.list("commits/")) == len(writer.committed)
    assert Ledger(storage).committed_ids() == committed
    assert storage.list("tmp/") == []
    with CacheWriter(storage, spec) as second:  # resume: only what is pending
        for sample_id in Ledger(storage).pending([f"s{number:04d}" for number in range(30)]):
            second.write(make_sample(spec, int(sample_id[1:])))
    assert seal(storage, expected_ids=[f"s{number:04d}" for number in range(30)]).duplicates == 0


def crash_before_shard(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at_put(monkeypatch, "shards/", after=False)


def crash_after_shard(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at_put(monkeypatch, "shards/", after=True)


def crash_before_record(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at_put(monkeypatch, "commits/", after=False)


def crash_after_record(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_at_put(monkeypatch, "commits/", after=True)


def crash_inside_publishing(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(backend_module.os, "replace", dies)


def crash_before_file_is_closed(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: object) -> None:
        raise Crash

    monkeypatch.setattr(parquet_shard.ParquetShardWriter, "finish", dies)
    monkeypatch.setattr(tar_shard.TarShardWriter, "finish", dies)


def crash_at_put(monkeypatch: pytest.MonkeyPatch, prefix: str, *, after: bool) -> None:
    put = Storage.put

    def dying(self: Storage, name: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if name.startswith(prefix) and not after:
            raise Crash
        put(self, name, data, if_absent=if_absent)
        if name.startswith(prefix):
            raise Crash

    monkeypatch.setattr(Storage, "put", dying)


def write_all(writer: CacheWriter, spec: CacheSpec, numbers: range) -> None:
    for number in numbers:
        writer.write(make_sample(spec, number))


CRASHES = [
    crash_before_file_is_closed,
    crash_before_shard,
    crash_inside_publishing,
    crash_after_shard,
    crash_before_record,
    crash_after_record,
]


@pytest.mark.parametrize("crash", CRASHES)
def test_crash_at_every_step_loses_and_doubles_nothing(
    storage: Storage, crash: Callable[[Storage, pytest.MonkeyPatch], None]
) -> None:
    spec = make_spec(shard_bytes=4000)
    ids = [f"s{number:04d}" for number in range(12)]
    create_cache(storage, spec)
    with pytest.MonkeyPatch.context() as patch:
        writer = CacheWriter(storage, spec)
        writer.write(make_sample(spec, 0))
        crash(storage, patch)
        # A dead process runs no clean-up either.
        patch.setattr(CacheWriter, "abandon", lambda self: None)
        with pytest.raises(Crash):
            write_all(writer, spec, range(1, 12))
    for record in Ledger(storage).records():  # whatever is committed is whole
        assert storage.size(record.name) == record.num_bytes
    with CacheWriter(storage, spec) as second:
        for sample_id in Ledger(storage).pending(ids):
            second.write(make_sample(spec, int(sample_id[1:])))
    manifest = seal(storage, expected_ids=ids)
    assert (manifest.num_samples, manifest.duplicates) == (12, 0)
    reader = CacheReader(storage, verify="always")
    assert reader.ids == ids
    for position, sample_id in enumerate(ids):
        wanted = make_sample(spec, int(sample_id[1:]))
        assert np.array_equal(reader.read(position).hidden_states, wanted.hidden_states)
    report = verify_cache(storage)
    assert not report.damaged
    if crash in (crash_after_shard, crash_before_record):
        assert [finding.kind for finding in report.findings].count("orphan") == 1


def test_two_writers_at_once(storage: Storage) -> None:
    spec = make_spec(shard_bytes=4000)
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            create_cache(storage, spec)
            with CacheWriter(storage, spec) as writer:
                for number in range(start, 40, 2):
                    writer.write(make_sample(spec, number))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    ids = [f"s{number:04d}" for number in range(40)]
    assert seal(storage, expected_ids=ids).duplicates == 0
    assert verify_cache(storage).findings == ()


@pytest.mark.parametrize(("samples", "writers"), [(7, 4), (3, 4), (0, 2)])
def test_uneven_work_leaves_no_empty_shard(storage: Storage, samples: int, writers: int) -> None:
    spec = make_spec(shard_bytes=1)  # every sample fills a shard
    create_cache(storage, spec)
    for rank in range(writers):
        with CacheWriter(storage, spec) as writer:
            for number in range(rank, samples, writers):
                writer.write(make_sample(spec, number))
    manifest = seal(storage, expected_ids=[f"s{number:04d}" for number in range(samples)])
    assert [shard.num_samples for shard in manifest.shards] == [1] * samples
    assert len(CacheReader(storage)) == samples


def test_scratch_folder_holds_one_shard_at_most(storage: Storage, tmp_path: Path) -> None:
    spec = make_spec(shard_bytes=4000)
    scratch = tmp_path / "scratch"
    create_cache(storage, spec)
    with CacheWriter(storage, spec, scratch_dir=scratch) as writer:
        for number in range(20):
            writer.write(make_sample(spec, number))
            assert len(list(scratch.iterdir())) <= 1
    assert list(scratch.iterdir()) == []


def test_full_disk_stops_with_a_line_and_resumes(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    create_cache(storage, SPEC)
    with monkeypatch.context() as patch:

        def full(self: object, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(parquet_shard.ParquetShardWriter, "add", full)
        writer = CacheWriter(storage, SPEC)
        with pytest.raises(StorageError, match="No space left on device; free some space") as caught:
            writer.write(GOOD)
        assert "\n" not in str(caught.value)
    assert storage.list("tmp/") == []
    writer.write(GOOD)  # the same writer can go on once there is space
    assert len(writer.close()) == 1


def test_incomplete_upload_is_not_committed(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "size", lambda self, name: 10)
    with pytest.raises(StorageError, match=r"10 bytes arrived of \d+"), CacheWriter(storage, SPEC) as writer:
        writer.write(GOOD)
    assert storage.list("commits/") == []


def test_lost_answer_to_our_own_record_is_no_error(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Storage.put

    def answers_late(self: Storage, name: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        put(self, name, data, if_absent=if_absent)
        if name.startswith("commits/"):
            raise AlreadyExists(name)  # what a retried conditional put meets: itself

    monkeypatch.setattr(Storage, "put", answers_late)
    with CacheWriter(storage, SPEC) as writer:
        writer.write(GOOD)
    assert len(writer.committed) == 1


def test_no_cache_here(storage: Storage) -> None:
    with pytest.raises(NotFound, match=r"holds no Target Cache \(no cache.json\)"):
        load_spec(storage)


def test_layers_of_the_settings_are_checked_against_the_target() -> None:
    assert isinstance(make_spec(layer_ids=(-1, 3)), CacheSpec)
