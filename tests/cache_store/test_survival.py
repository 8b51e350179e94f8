"""Damage and crashes of every kind: nothing unnoticed, nothing lost, and repair, gc and the same build put it right."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store import backend
from cache_store.audit import verify_cache
from cache_store.dataset import TargetCacheStream, make_loader
from cache_store.errors import CacheError, StorageError
from cache_store.ledger import Ledger, seal
from cache_store.mixture import Source
from cache_store.packing import StreamConfig
from cache_store.parquet_file import RowGroupFile
from cache_store.reader import CacheReader
from cache_store.repair import repair_cache
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import make_sample, make_spec
from tests.cache_store.survival import check_readers, check_whole, put_right, same_build, sample_ids

COUNT = 6
SHARD_BYTES = {"parquet": 6000, "tar": 9000}  # two shards


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "cache"))


def small_spec(form: str) -> Any:
    return make_spec(format=form, shard_bytes=SHARD_BYTES[form])


def folder_of(storage: Storage) -> Path:
    assert storage.local_root is not None
    return storage.local_root


def interesting_bytes(storage: Storage) -> list[tuple[str, int]]:
    """(shard, length) of cuts at and around every boundary that a record names, and inside the container's parts."""
    record = max(Ledger(storage).records(), key=lambda record: record.num_samples)
    edges = {0, 4, record.num_bytes, record.num_bytes - 4, record.num_bytes - 8, record.num_bytes - record.footer_bytes}
    for sample in record.samples:
        edges |= {sample.offset, sample.offset + sample.length, sample.offset + sample.length // 2}
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    return [(record.name, length) for length in sorted(near) if 0 <= length < record.num_bytes]


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_a_shard_cut_at_every_interesting_byte(storage: Storage, form: str) -> None:
    spec = small_spec(form)
    same_build(storage, spec, COUNT)
    for number, (name, length) in enumerate(interesting_bytes(storage)):
        path = folder_of(storage) / name
        content = path.read_bytes()
        path.write_bytes(content[:length])
        assert any(f.kind == "wrong-size" and f.name == name for f in verify_cache(storage, quick=True).findings)
        check_readers(storage, spec, COUNT)
        if number % 7 == 0:  # the shard gets another name, so the cuts that follow are made in a copy
            copy = open_storage(str(folder_of(storage).parent / f"copy{number}"))
            shutil.copytree(folder_of(storage), folder_of(copy))
            report, built = put_right(copy, spec, COUNT)
            assert report.lost == tuple(built)
            assert 0 < len(built) < COUNT, "only the damaged shard is built anew"
        path.write_bytes(content)
    check_whole(storage, spec, COUNT)


@pytest.fixture(scope="module", params=["parquet", "tar"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """A sound cache that tests copy before they damage it."""
    storage = open_storage(str(tmp_path_factory.mktemp("built") / request.param))
    same_build(storage, small_spec(request.param), COUNT)
    return storage


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_noticed_and_mended(built: Storage, tmp_path: Path, data: st.DataObject) -> None:
    form = folder_of(built).name
    spec = small_spec(form)
    storage = open_storage(str(tmp_path / "copy"))
    shutil.rmtree(folder_of(storage), ignore_errors=True)
    shutil.copytree(folder_of(built), folder_of(storage))
    info = data.draw(st.sampled_from([item for item in storage.list("") if not item.name.startswith("tmp/")]))
    place, bit = data.draw(st.integers(0, info.size - 1)), data.draw(st.integers(0, 7))
    path = folder_of(storage) / info.name
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(bytes(content))
    with contextlib.suppress(CacheError):  # a manifest, index or cache.json is refused as a whole, in our own words
        check_readers(storage, spec, COUNT)
    if info.name == "cache.json":
        with contextlib.suppress(CacheError):
            assert verify_cache(storage).damaged
    else:
        assert verify_cache(storage).damaged, f"{info.name}, byte {place}, bit {bit}"
    put_right(storage, spec, COUNT)


def missing_shard(folder: Path) -> None:
    next((folder / "shards").iterdir()).unlink()


def missing_record(folder: Path) -> None:
    next((folder / "commits").iterdir()).unlink()


def all_records_missing(folder: Path) -> None:
    shutil.rmtree(folder / "commits")


def extra_shard(folder: Path) -> None:
    shutil.copy(next((folder / "shards").iterdir()), folder / "shards" / "part-dead.parquet")


def renamed_shard(folder: Path) -> None:
    path = next((folder / "shards").iterdir())
    path.rename(path.with_name(f"part-other{path.suffix}"))


def renamed_record(folder: Path) -> None:
    path = next((folder / "commits").iterdir())
    path.rename(path.with_name("part-other.json"))


def swapped_shards(folder: Path) -> None:
    first, second = sorted((folder / "shards").iterdir())[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def missing_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def missing_index(folder: Path) -> None:
    shutil.rmtree(folder / "index")


def neither_manifest_nor_index(folder: Path) -> None:
    missing_manifest(folder)
    missing_index(folder)


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


def missing_settings(folder: Path) -> None:
    (folder / "cache.json").unlink()


def other_settings(folder: Path) -> None:
    spec = make_spec(format=folder.name, shard_bytes=SHARD_BYTES[folder.name], identity={"seed": 7})
    (folder / "cache.json").write_text(spec.to_json())


def missing_rejects(folder: Path) -> None:
    shutil.rmtree(folder / "rejects")


SOUND = (extra_shard,)
DISASTERS = [
    *(missing_shard, missing_record, all_records_missing, extra_shard, renamed_shard, renamed_record, swapped_shards),
    *(missing_manifest, missing_index, neither_manifest_nor_index, empty_manifest, missing_settings, other_settings),
    missing_rejects,
]


@pytest.mark.parametrize("disaster", DISASTERS)
def test_objects_that_are_missing_extra_or_renamed(
    built: Storage, tmp_path: Path, disaster: Callable[[Path], None]
) -> None:
    spec = small_spec(folder_of(built).name)
    folder = tmp_path / folder_of(built).name
    shutil.copytree(folder_of(built), folder)
    disaster(folder)
    storage = open_storage(str(folder))
    if disaster is missing_settings:
        with pytest.raises(CacheError, match=r"no cache\.json"):
            verify_cache(storage)
        assert same_build(storage, spec, COUNT) == []
        check_whole(storage, spec, COUNT)
        return
    assert verify_cache(storage).findings != ()
    assert verify_cache(storage).damaged == (disaster not in SOUND)
    put_right(storage, spec, COUNT)


def test_lost_settings_are_not_replaced_by_others(built: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(folder_of(built), folder)
    missing_settings(folder)
    with pytest.raises(CacheError, match=r"lost its cache\.json, and its shards were written under other settings"):
        create_cache(open_storage(str(folder)), make_spec(identity={"seed": 7}))
    assert not (folder / "cache.json").exists()


# Names that the folder backend calls to change the disk; a process that dies before one of them has done all earlier.
STEPS = ("open", "fsync", "link", "replace", "rename", "unlink", "mkdir")


def die_at(step: int, work: Callable[[], Any]) -> int:
    """Run `work` in a child process that is gone before its step-th change of the disk; 0 when it came to its end."""
    child = os.fork()
    if child == 0:
        left = [step]
        try:
            for name in STEPS:
                real = getattr(os, name)

                def counting(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(9)  # as a kill: no clean-up runs
                    return real(*args, **kwargs)

                setattr(os, name, counting)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("form", "stride"), [("parquet", 1), ("tar", 5)])
def test_killed_before_every_change_of_the_disk(tmp_path: Path, form: str, stride: int) -> None:
    spec, count = small_spec(form), 4
    for step in range(1, 1000, stride):
        storage = open_storage(str(tmp_path / f"cache{step}"))
        code = die_at(step, lambda storage=storage: same_build(storage, spec, count))  # type: ignore[misc]
        assert code in (0, 9)
        if storage.exists("cache.json"):
            findings = verify_cache(storage).findings
            assert {finding.kind for finding in findings} <= {"not-sealed", "orphan"}, "whatever is committed is whole"
            put_right(storage, spec, count)
        else:
            same_build(storage, spec, count)
            put_right(storage, spec, count)
        if code == 0:
            break
        shutil.rmtree(folder_of(storage))
    assert step > 40, "every put has several steps"


def test_killed_while_repairing(tmp_path: Path) -> None:
    spec = small_spec("parquet")
    source = open_storage(str(tmp_path / "parquet"))
    same_build(source, spec, COUNT)
    missing_shard(folder_of(source))
    (folder_of(source) / "rejects").rename(folder_of(source) / "gone")
    for step in range(1, 100):
        storage = open_storage(str(tmp_path / f"cache{step}"))
        shutil.copytree(folder_of(source), folder_of(storage))
        code = die_at(step, lambda storage=storage: repair_cache(storage))  # type: ignore[misc]
        put_right(storage, spec, COUNT)
        shutil.rmtree(folder_of(storage))
        if code == 0:
            break
    assert step > 4


def write_all(writer: CacheWriter, spec: Any) -> None:
    for number in range(COUNT):
        writer.write(make_sample(spec, number))


def test_an_exception_inside_the_parquet_writer(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec("parquet")
    create_cache(storage, spec)
    real, calls = RowGroupFile.write_row, [0]

    def breaks(self: Any, *args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise pa.ArrowInvalid("made by the test")
        real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RowGroupFile, "write_row", breaks)
        writer = CacheWriter(storage, spec)
        with pytest.raises(pa.ArrowInvalid):
            write_all(writer, spec)
    committed = Ledger(storage).committed_ids()
    assert storage.list("tmp/") == [], "the broken shard is gone"
    for number in range(COUNT):  # the writer itself can go on
        if f"s{number:04d}" not in committed:
            writer.write(make_sample(spec, number))
    writer.close()
    same_build(storage, spec, COUNT)
    check_whole(storage, spec, COUNT)


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("step", range(1, 12))
def test_a_disk_that_fills_up_at_every_write(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, form: str, step: int
) -> None:
    spec, left = small_spec(form), [step]
    real = os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(backend.os, "fsync", full)
        with pytest.raises(StorageError, match="free some space") as caught:
            same_build(storage, spec, COUNT)
        assert "\n" not in str(caught.value)
    same_build(storage, spec, COUNT)
    put_right(storage, spec, COUNT)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {mount} 2>/dev/null") != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        spec = make_spec(shard_bytes=100_000)
        storage = open_storage(str(mount / "cache"))
        with pytest.raises(StorageError, match="free some space") as caught:
            same_build(storage, spec, 400)
        assert "\n" not in str(caught.value)
        done = len(Ledger(storage).committed_ids())
        assert 0 < done < 400
        assert storage.list("tmp/") == []
        assert os.system(f"mount -o remount,size=8m {mount}") == 0
        assert len(same_build(storage, spec, 400)) == 400 - done
        assert verify_cache(storage).findings == ()
    finally:
        os.system(f"umount -l {mount}")


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_a_sample_larger_than_a_shard(storage: Storage, form: str) -> None:
    spec = make_spec(format=form, shard_bytes=1000)
    create_cache(storage, spec)
    large = make_sample(spec, 1, tokens=500)
    with CacheWriter(storage, spec) as writer:
        for sample in (make_sample(spec, 0), large, make_sample(spec, 2)):
            writer.write(sample)
    seal(storage, expected_ids=sample_ids(3))
    assert CacheReader(storage).read(1).hidden_states.tobytes() == large.hidden_states.tobytes()
    assert verify_cache(storage).findings == ()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_three_shards_over_eight_loader_workers(storage: Storage) -> None:
    spec = make_spec(shard_bytes=1)
    same_build(storage, spec, 3)
    config = StreamConfig(seed=1, global_batch_size=2, micro_batch_size=1, max_length=64, num_steps=3)
    orders = []
    for workers in (0, 8):
        stream = TargetCacheStream([Source(storage=storage)], config)
        orders.append([batch.sample_ids for batch in make_loader(stream, num_workers=workers, prefetch=2)])
    assert orders[0] == orders[1]
    assert sorted(name for batch in orders[0] for name in batch) == sorted(sample_ids(3) * 2)


def test_an_empty_cache(storage: Storage) -> None:
    spec = make_spec()
    same_build(storage, spec, 0)
    check_whole(storage, spec, 0)
    assert put_right(storage, spec, 0)[1] == []
