from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch
from cache_store.ledger import Ledger, Reject, seal
from cache_store.manifest import MANIFEST
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import build_cache, make_sample, make_spec

SPEC = make_spec()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "cache"))


def write(storage: Storage, numbers: range | list[int]) -> None:
    with CacheWriter(storage, SPEC) as writer:
        for number in numbers:
            writer.write(make_sample(SPEC, number))


def ids(count: int) -> list[str]:
    return [f"s{number:04d}" for number in range(count)]


def test_pending_is_a_set_difference_in_order(storage: Storage) -> None:
    create_cache(storage, SPEC)
    write(storage, [1, 3])
    ledger = Ledger(storage)
    ledger.reject([Reject(sample_id="s0002", stage="regenerate", reason="too long", source="a.jsonl:3")])
    assert ledger.pending(["s0004", "s0003", "s0000", "s0004", "s0002", "s0001"]) == ["s0004", "s0000"]
    write(storage, [4])  # the same ledger sees later commits
    assert ledger.pending(ids(5)) == ["s0000"]
    assert ledger.rejected()["s0002"].source == "a.jsonl:3"
    assert Ledger(storage).rejected() == ledger.rejected()


def test_rejects_are_checked(storage: Storage) -> None:
    with pytest.raises(CacheError, match="stage must be one of"):
        Reject(sample_id="a", stage="lunch", reason="x")
    Ledger(storage).reject([])
    assert storage.list("rejects/") == []
    storage.put("rejects/x.jsonl", b'{"sample_id": "a"}\n')
    with pytest.raises(CacheError, match=r"rejects/x.jsonl line 1: not a reject"):
        Ledger(storage).rejected()


def test_seal_accounts_for_every_input(storage: Storage) -> None:
    create_cache(storage, SPEC)
    write(storage, range(6))
    Ledger(storage).reject(
        [
            Reject(sample_id="s0006", stage="prompts", reason="empty"),
            Reject(sample_id="s0007", stage="prompts", reason="empty"),
            Reject(sample_id="s0008", stage="extract", reason="short"),
        ]
    )
    manifest = seal(storage, expected_ids=ids(9))
    assert (manifest.num_samples, manifest.rejected) == (6, 3)
    assert manifest.rejects == {"extract": {"short": 1}, "prompts": {"empty": 2}}
    assert manifest.num_tokens == sum(len(make_sample(SPEC, number).input_ids) for number in range(6))
    assert manifest.num_supervised == sum(int(make_sample(SPEC, number).loss_mask.sum()) for number in range(6))


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (ids(5), r"2 inputs are neither committed nor rejected \(s0003, s0004\)"),
        (ids(2), r"1 ids are no input \(s0002\)"),
        (["s0000", "s0001", "other"], r"1 inputs are .*\(other\) and 1 ids are no input \(s0002\)"),
    ],
)
def test_seal_refuses_a_mismatch(storage: Storage, expected: list[str], message: str) -> None:
    build_cache(storage, SPEC, 3, sealed=False)
    with pytest.raises(CacheIncomplete, match=message):
        seal(storage, expected_ids=expected)
    assert not storage.exists(MANIFEST)


def test_duplicates_are_counted_and_resolved_the_same_way_always(storage: Storage) -> None:
    create_cache(storage, SPEC)
    write(storage, range(5))
    write(storage, range(2, 8))  # a task that ran twice
    first = seal(storage, expected_ids=ids(8))
    assert (first.num_samples, first.duplicates) == (8, 3)
    assert sum(shard.used for shard in first.shards) == 8
    names = sorted(record.name for record in Ledger(storage).records())
    assert [shard.name for shard in first.shards] == names
    full = [shard for shard in first.shards if shard.used == shard.num_samples]
    assert full[0].name == names[0], "the first record by name keeps all of its samples"
    assert CacheReader(storage).ids == ids(8)


def test_seal_is_idempotent_and_follows_new_shards(storage: Storage) -> None:
    create_cache(storage, SPEC)
    write(storage, range(4))
    first = seal(storage, expected_ids=ids(4))
    before = {info.name: storage.read(info.name) for info in storage.list("")}
    assert seal(storage, expected_ids=ids(4)) == first
    assert {info.name: storage.read(info.name) for info in storage.list("")} == before
    old = CacheReader(storage)
    write(storage, range(4, 6))
    second = seal(storage, expected_ids=ids(6))
    assert second.num_samples == 6
    assert len(CacheReader(storage)) == 6
    assert old.read_id("s0003").sample_id == "s0003", "a reader of the older manifest goes on"


def test_positions_do_not_depend_on_who_wrote_what(tmp_path: Path) -> None:
    orders = []
    for name, parts in (("a", [range(0, 6)]), ("b", [[5, 1, 3], [4, 0], [2]])):
        storage = open_storage(str(tmp_path / name))
        create_cache(storage, SPEC)
        for part in parts:
            write(storage, part)
        seal(storage, expected_ids=ids(6))
        orders.append(CacheReader(storage).ids)
    assert orders[0] == orders[1]


def test_committed_after_all_counts_as_committed(storage: Storage) -> None:
    create_cache(storage, SPEC)
    Ledger(storage).reject([Reject(sample_id="s0000", stage="extract", reason="engine died")])
    write(storage, [0])
    manifest = seal(storage, expected_ids=["s0000"])
    assert (manifest.num_samples, manifest.rejected, manifest.rejects) == (1, 0, {})


def test_cache_without_samples_can_be_sealed(storage: Storage) -> None:
    create_cache(storage, SPEC)
    manifest = seal(storage, expected_ids=[])
    assert (manifest.num_samples, manifest.shards) == (0, ())
    assert len(CacheReader(storage)) == 0


def test_shard_of_other_settings_is_refused(storage: Storage) -> None:
    create_cache(storage, SPEC)
    other = make_spec(identity={**SPEC.identity, "seed": 2})
    with CacheWriter(storage, other) as writer:
        writer.write(make_sample(other, 0))
    with pytest.raises(CacheMismatch, match="was written under settings"):
        seal(storage, expected_ids=None)
