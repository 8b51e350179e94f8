from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store import codec
from cache_store.audit import AuditProgress, verify_cache
from cache_store.errors import NotFound
from cache_store.ledger import Ledger
from cache_store.manifest import MANIFEST, SPEC, ShardRecord
from cache_store.storage import Storage, open_storage
from cache_store.writer import create_cache, record_name
from tests.cache_store.samples import build_cache, make_sample, make_spec

SHARD_BYTES = 9_000  # several samples in either container
pytestmark = pytest.mark.usefixtures("both_formats")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(shard_bytes=SHARD_BYTES), 14)
    return storage


def first(storage: Storage) -> ShardRecord:
    """A shard with several samples, whatever the random names."""
    return max(Ledger(storage).records(), key=lambda record: record.num_samples)


def edit_record(storage: Storage, edit: Callable[[dict[str, Any]], None]) -> None:
    name = record_name(first(storage).name)
    data = json.loads(storage.read(name))
    edit(data)
    storage.put(name, json.dumps(data).encode())


def missing_shard(storage: Storage) -> None:
    storage.delete(first(storage).name)


def truncated_shard(storage: Storage) -> None:
    name = first(storage).name
    storage.put(name, storage.read(name)[:-100])


def flipped_state_byte(storage: Storage) -> None:
    sample = first(storage).samples[0]
    flip(storage, sample.offset + sample.length - 2)


def flipped_footer_byte(storage: Storage) -> None:
    flip(storage, first(storage).num_bytes - 3)


def flip(storage: Storage, offset: int) -> None:
    name = first(storage).name
    content = bytearray(storage.read(name))
    content[offset] ^= 0x10
    storage.put(name, bytes(content))


def record_lacks_a_row(storage: Storage) -> None:
    def edit(data: dict[str, Any]) -> None:
        dropped = data["samples"].pop()
        data["num_samples"] -= 1
        data["num_tokens"] -= dropped["tokens"]

    edit_record(storage, edit)


def record_with_wrong_totals(storage: Storage) -> None:
    edit_record(storage, lambda data: data.update(num_samples=99))


def record_swaps_ids(storage: Storage) -> None:
    def edit(data: dict[str, Any]) -> None:
        a, b = data["samples"][:2]
        a["sample_id"], b["sample_id"] = b["sample_id"], a["sample_id"]

    edit_record(storage, edit)


def record_with_another_mask(storage: Storage) -> None:
    edit_record(storage, lambda data: data["samples"][0].update(supervised_spans=[[0, 1]]))


def record_of_another_shard(storage: Storage) -> None:
    records = Ledger(storage).records()
    storage.put(record_name(records[0].name), records[1].to_json().encode())


def record_of_other_settings(storage: Storage) -> None:
    edit_record(storage, lambda data: data.update(fingerprint="f" * 64))


def other_layers_in_cache_json(storage: Storage) -> None:
    storage.put(SPEC, make_spec(shard_bytes=SHARD_BYTES, layer_ids=(0, 1)).to_json().encode())


def manifest_of_another_build(storage: Storage) -> None:
    data = json.loads(storage.read(MANIFEST))
    data["shards"].pop()
    storage.put(MANIFEST, json.dumps(data).encode())


def no_manifest(storage: Storage) -> None:
    storage.delete(MANIFEST)


def no_index(storage: Storage) -> None:
    storage.delete(storage.list("index/")[0].name)


def damaged_index(storage: Storage) -> None:
    storage.put(storage.list("index/")[0].name, b"rubbish")


DAMAGE: list[tuple[Callable[[Storage], None], str, str]] = [
    (missing_shard, "missing-shard", "record says"),
    (truncated_shard, "wrong-size", "record says"),
    (flipped_state_byte, "checksum", "': crc32c"),
    (flipped_footer_byte, "wrong-layout", "at the end of the"),
    (record_lacks_a_row, "wrong-counts", "samples"),
    (record_with_wrong_totals, "bad-record", "totals say 99"),
    (record_swaps_ids, "id-mismatch", "the shard holds"),
    (record_with_another_mask, "wrong-tokens", "supervised positions differ"),
    (record_of_another_shard, "bad-record", "is a record of shards/"),
    (record_of_other_settings, "wrong-settings", "written under ffffffffffff"),
    (other_layers_in_cache_json, "wrong-layout", "from the settings"),
    (manifest_of_another_build, "bad-manifest", "shards: not what the commit records"),
    (no_manifest, "not-sealed", "has not finished"),
    (no_index, "bad-manifest", "missing"),
    (damaged_index, "bad-manifest", "crc32c"),
]


@pytest.mark.parametrize(("damage", "kind", "detail"), DAMAGE, ids=[item[0].__name__ for item in DAMAGE])
def test_every_kind_of_damage_is_found(
    storage: Storage, damage: Callable[[Storage], None], kind: str, detail: str
) -> None:
    damage(storage)
    report = verify_cache(storage)
    assert report.damaged
    assert any(finding.kind == kind and detail in finding.detail for finding in report.findings), report.findings


def test_sound_cache_has_no_findings(storage: Storage) -> None:
    seen: list[AuditProgress] = []
    report = verify_cache(storage, progress=seen.append)
    assert report.findings == ()
    assert not report.damaged
    assert (report.shards, report.samples) == (len(seen), 14)
    assert seen[-1] == AuditProgress(report.shards, report.shards, report.num_bytes, report.num_bytes, 0)
    assert report.num_bytes == sum(info.size for info in storage.list("shards/"))


def test_orphans_are_listed_but_are_no_damage(storage: Storage) -> None:
    storage.put("shards/part-dead.parquet", b"half a shard")
    storage.put("tmp/part-dying.parquet", b"less")
    report = verify_cache(storage)
    assert [(finding.kind, finding.name) for finding in report.findings] == [
        ("orphan", "shards/part-dead.parquet"),
        ("orphan", "tmp/part-dying.parquet"),
    ]
    assert not report.damaged


def test_quick_reads_no_shard(storage: Storage) -> None:
    flipped_state_byte(storage)
    assert verify_cache(storage, quick=True).findings == ()
    missing_shard(storage)
    assert [finding.kind for finding in verify_cache(storage, quick=True).findings] == ["missing-shard"]


@pytest.mark.parametrize(("field", "what"), [("hidden_states", "hidden"), ("last_hidden_state", "last hidden")])
def test_states_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, what: str) -> None:
    spec = make_spec()
    storage = open_storage(str(tmp_path / "bad"))
    bits = getattr(make_sample(spec, 0, tokens=8), field).copy()
    bits[..., 6, 3] = 0x7FFF
    monkeypatch.setattr("cache_store.writer.check_sample", lambda *_: None)
    build_cache(storage, spec, 1, tokens=8, **{field: bits})
    found = verify_cache(storage).findings
    assert [finding.kind for finding in found] == ["not-finite"]
    assert what in found[0].detail


def test_planes_of_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # float32 states under a label that says bf16: twice the bytes.
    storage = open_storage(str(tmp_path / "bad"))
    monkeypatch.setattr(codec, "encode", lambda tag, bits: (np.zeros(bits.size * 2, np.uint8),) * 2)
    build_cache(storage, make_spec(), 1)
    monkeypatch.undo()
    found = verify_cache(storage).findings
    assert {finding.kind for finding in found} == {"wrong-layout"}


def test_no_cache_here(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        verify_cache(open_storage(str(tmp_path)))


def test_cache_that_has_only_begun(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    create_cache(storage, make_spec())
    assert [finding.kind for finding in verify_cache(storage).findings] == ["not-sealed"]
