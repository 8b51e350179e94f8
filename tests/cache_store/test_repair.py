from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.audit import verify_cache
from cache_store.calibration import CALIBRATION, CALIBRATION_COPIES, calibrate, commit_calibration
from cache_store.errors import CacheError, CacheIncomplete, NotFound, ShardCorrupt
from cache_store.exclusions import load_exclusions
from cache_store.ledger import Ledger
from cache_store.manifest import MANIFEST, SPEC
from cache_store.reader import CacheReader
from cache_store.repair import exclude_damage, repair_cache
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache, record_name
from tests.cache_store.samples import make_sample, make_spec
from tests.cache_store.survival import check_whole, put_right, same_build

SPEC_OF_TEST = make_spec(shard_bytes=6000)
COUNT = 8


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    same_build(storage, SPEC_OF_TEST, COUNT)
    return storage


def flip(storage: Storage, name: str, place: int) -> None:
    content = bytearray(storage.read(name))
    content[place] ^= 0x10
    storage.put(name, bytes(content))


def damage_one_sample(storage: Storage) -> tuple[str, str]:
    """Flip a byte of a shard's second sample; (shard, id)."""
    record = max(Ledger(storage).records(), key=lambda record: record.num_samples)
    sample = record.samples[1]
    flip(storage, record.name, sample.offset + sample.length - 3)
    return record.name, sample.sample_id


def everything(storage: Storage) -> dict[str, bytes]:
    return {info.name: storage.read(info.name) for info in storage.list("")}


def test_a_sound_cache_is_left_alone(storage: Storage) -> None:
    before = everything(storage)
    report = repair_cache(storage)
    assert report.whole
    assert report.steps == ()
    assert everything(storage) == before


def test_a_damaged_shard_is_moved_aside_and_only_its_samples_are_built(storage: Storage) -> None:
    shard, _ = damage_one_sample(storage)
    (record,) = (record for record in Ledger(storage).records() if record.name == shard)
    before = everything(storage)
    planned = repair_cache(storage, dry_run=True)
    assert everything(storage) == before, "a dry run changes nothing"
    report = repair_cache(storage)
    assert report.steps == planned.steps
    assert report.needs_build
    assert report.lost == tuple(sorted(sample.sample_id for sample in record.samples))
    with pytest.raises(CacheIncomplete, match="not sealed"):
        CacheReader(storage)
    moved = {info.name.split("/", 2)[2]: storage.read(info.name) for info in storage.list("aside/")}
    assert moved[shard] == before[shard], "nothing is deleted"
    assert len(moved) == 3, "shard, record and manifest"
    assert same_build(storage, SPEC_OF_TEST, COUNT) == list(report.lost)
    check_whole(storage, SPEC_OF_TEST, COUNT)


def test_a_lost_shard_whose_samples_stand_elsewhere_costs_no_build(storage: Storage) -> None:
    with CacheWriter(storage, SPEC_OF_TEST) as writer:  # a task that ran twice
        for number in range(COUNT):
            writer.write(make_sample(SPEC_OF_TEST, number))
    twice = {record.name for record in writer.committed}
    storage.delete(next(record.name for record in Ledger(storage).records() if record.name not in twice))
    report = repair_cache(storage)
    assert report.whole
    assert report.lost == ()
    assert report.steps[-1].kind == "sealed"
    check_whole(storage, SPEC_OF_TEST, COUNT)


@pytest.mark.parametrize("damage", ["manifest", "index", "both"])
def test_manifest_and_index_come_from_the_records(storage: Storage, damage: str) -> None:
    if damage != "manifest":
        flip(storage, storage.list("index/")[0].name, 100)
    if damage != "index":
        storage.put(MANIFEST, storage.read(MANIFEST)[:-40])
    report = repair_cache(storage)
    assert report.whole
    assert report.steps[-1].kind == "sealed"
    check_whole(storage, SPEC_OF_TEST, COUNT)


def test_an_unfinished_build_is_not_sealed_by_repair(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    same_build(storage, SPEC_OF_TEST, 3)
    storage.delete(MANIFEST)
    for info in storage.list("index/"):
        storage.delete(info.name)
    report = repair_cache(storage)
    assert report.needs_build
    assert not storage.exists(MANIFEST)


def test_a_damaged_manifest_beside_a_lost_record_is_not_sealed(storage: Storage) -> None:
    storage.put(MANIFEST, b"{}")
    for info in storage.list("index/"):
        storage.delete(info.name)
    storage.delete(storage.list("commits/")[0].name)
    report = repair_cache(storage)  # the shard without a record shows that something is missing
    assert report.needs_build
    put_right(storage, SPEC_OF_TEST, COUNT)


def test_settings_that_no_shard_was_written_under(storage: Storage) -> None:
    storage.put(SPEC, make_spec(shard_bytes=6000, identity={"seed": 9}).to_json().encode())
    report = repair_cache(storage)
    assert [step.name for step in report.steps] == [SPEC]
    assert report.lost == ()
    assert len(Ledger(storage).records()) > 1, "no shard was dropped for a wrong cache.json"
    assert same_build(storage, SPEC_OF_TEST, COUNT) == []


def test_an_id_that_only_a_damaged_record_knows_is_not_lost(storage: Storage) -> None:
    record = Ledger(storage).records()[0]
    name, wrong = record_name(record.name), record.samples[0].sample_id
    storage.put(name, storage.read(name).replace(wrong.encode(), b"r9999"))
    report = repair_cache(storage)
    assert report.lost == tuple(sorted(sample.sample_id for sample in record.samples))
    put_right(storage, SPEC_OF_TEST, COUNT)


def test_quick_repair_reads_no_shard(storage: Storage) -> None:
    damage_one_sample(storage)
    assert repair_cache(storage, quick=True).whole
    name = Ledger(storage).records()[0].name
    storage.put(name, storage.read(name)[:-1])
    assert repair_cache(storage, quick=True).needs_build
    put_right(storage, SPEC_OF_TEST, COUNT)


@pytest.mark.parametrize("damage", ["missing", "rubbish", "other scales"])
def test_lost_channel_scales_come_back_from_their_copy(tmp_path: Path, damage: str) -> None:
    spec = make_spec(codec="i8cr", last_codec="i8cr", shard_bytes=6000)
    storage = open_storage(str(tmp_path / "cache"))
    create_cache(storage, spec)
    commit_calibration(storage, spec, calibrate(spec, [make_sample(spec, number) for number in range(4)]))
    same_build(storage, spec, 4)
    content = storage.read(CALIBRATION)
    if damage == "missing":
        storage.delete(CALIBRATION)
    else:
        other = calibrate(spec, [make_sample(spec, 9)]).to_json().encode()
        storage.put(CALIBRATION, other if damage == "other scales" else b"{}")
    assert verify_cache(storage).damaged
    planned = repair_cache(storage, dry_run=True)
    report = repair_cache(storage)
    assert report.whole
    assert planned.steps == report.steps
    assert report.steps[-1].kind == "restored"
    assert storage.read(CALIBRATION) == content
    assert verify_cache(storage).findings == ()
    for info in storage.list(CALIBRATION_COPIES):
        storage.delete(info.name)
    storage.delete(CALIBRATION)
    report = repair_cache(storage)
    assert not report.whole
    assert [step.kind for step in report.steps] == ["left"]
    assert len(Ledger(storage).records()) > 0, "no shard is dropped for want of scales"


def test_no_cache_here(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        repair_cache(open_storage(str(tmp_path)))


def test_exclude_lists_what_is_damaged_and_moves_nothing(storage: Storage) -> None:
    shard, sample_id = damage_one_sample(storage)
    other = next(record for record in Ledger(storage).records() if record.name != shard)
    storage.delete(other.name)
    before = everything(storage)
    name, found = exclude_damage(storage)
    assert name is not None
    wanted = {sample_id, *(sample.sample_id for sample in other.samples)}
    assert {item.sample_id for item in found} == wanted
    assert {item.shard for item in found} == {shard, other.name}
    assert load_exclusions(storage, name) == tuple(sorted(found))
    assert everything(storage) == {**before, name: storage.read(name)}
    reader = CacheReader(storage, exclusions=name)
    assert {reader.ids[position] for position in reader.excluded.nonzero()[0]} == wanted
    with pytest.raises(ShardCorrupt, match="on the list of exclusions"):
        reader.read_id(sample_id)
    put_right(storage, SPEC_OF_TEST, COUNT)
    assert not CacheReader(storage, exclusions=name).excluded.any(), "what was built anew is used again"


def test_a_sound_sample_is_excluded_by_name(storage: Storage) -> None:
    _, damaged = damage_one_sample(storage)
    named = next(sample_id for sample_id in CacheReader(storage).ids if sample_id != damaged)
    name, found = exclude_damage(storage, sample_ids=[named])
    assert name is not None
    assert {item.sample_id: item.reason for item in found}[named] == "named by hand"
    reader = CacheReader(storage, exclusions=name)
    assert {reader.ids[position] for position in reader.excluded.nonzero()[0]} == {named, damaged}
    with pytest.raises(CacheError, match=r"holds no sample 'nobody' \(1 of 2 ids"):
        exclude_damage(storage, sample_ids=[named, "nobody"])


def test_damage_between_the_samples_excludes_none(storage: Storage) -> None:
    record = Ledger(storage).records()[0]
    flip(storage, record.name, 0)  # the container's own first byte
    assert verify_cache(storage).damaged
    name, found = exclude_damage(storage)
    assert (name, found) == (None, ())


def test_exclude_wants_a_sound_seal(storage: Storage) -> None:
    damage_one_sample(storage)
    storage.put(MANIFEST, b"{}")
    with pytest.raises(CacheIncomplete, match=r"run 'cache_store repair' without --exclude first"):
        exclude_damage(storage)
