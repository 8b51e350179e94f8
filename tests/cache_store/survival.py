"""What every survival test does after its catastrophe: repair, the same build again, gc; then nothing may differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_store.audit import verify_cache
from cache_store.errors import ShardCorrupt
from cache_store.gc import collect_garbage
from cache_store.ledger import Ledger, Reject, seal
from cache_store.reader import CacheReader
from cache_store.repair import RepairReport, repair_cache
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import needed_positions
from cache_store.storage import Storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import make_sample

REJECTED = Reject(sample_id="x0000", stage="prompts", reason="empty prompt", source="a.jsonl:1")


def sample_ids(count: int) -> list[str]:
    return [f"s{number:04d}" for number in range(count)]


def same_build(storage: Storage, spec: CacheSpec, count: int) -> list[str]:
    """What a build does, first or again: settings, what is pending, rejects, seal. Returns the ids that it wrote."""
    create_cache(storage, spec)
    ids = sample_ids(count)
    pending = Ledger(storage).pending([*ids, REJECTED.sample_id])
    with CacheWriter(storage, spec) as writer:
        for sample_id in pending:
            if sample_id == REJECTED.sample_id:
                Ledger(storage).reject([REJECTED])
            else:
                writer.write(make_sample(spec, int(sample_id[1:])))
    seal(storage, expected_ids=[*ids, REJECTED.sample_id])
    return [sample_id for sample_id in pending if sample_id != REJECTED.sample_id]


def same_sample(found: TargetSample, wanted: TargetSample) -> bool:
    rows = needed_positions(wanted.loss_mask)
    return (
        found.sample_id == wanted.sample_id
        and found.metadata == wanted.metadata
        and np.array_equal(found.input_ids, wanted.input_ids)
        and np.array_equal(found.loss_mask, wanted.loss_mask)
        and np.array_equal(found.hidden_states, wanted.hidden_states)
        and np.array_equal(found.last_hidden_state[rows], wanted.last_hidden_state[rows])
    )


def check_readers(storage: Storage, spec: CacheSpec, count: int) -> int:
    """Every sample is the original or is refused by name; returns how many are refused."""
    refused = []
    reader = CacheReader(storage, verify="always")
    assert reader.ids == sample_ids(count)
    for position in range(count):
        try:
            assert same_sample(reader.read(position), make_sample(spec, position))
        except ShardCorrupt as error:
            refused.append((position, str(error)))
    for position, message in refused:
        assert f"'s{position:04d}'" in message
        assert "cache_store repair" in message
        assert "\n" not in message
    return len(refused)


def check_whole(storage: Storage, spec: CacheSpec, count: int) -> None:
    assert verify_cache(storage).findings == ()
    assert check_readers(storage, spec, count) == 0
    assert storage.unfinished_uploads("") == []


def put_right(storage: Storage, spec: CacheSpec, count: int) -> tuple[RepairReport, Sequence[str]]:
    """Repair, the same build, gc; then nothing may be wrong. Returns the report and the ids that were built anew."""
    report = repair_cache(storage)
    built = same_build(storage, spec, count)
    assert set(report.lost) <= set(built), "what repair says is lost is what the build makes"
    collect_garbage(storage, delete=True, older_than_s=0, aside=True)
    check_whole(storage, spec, count)
    return report, built
