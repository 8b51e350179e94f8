"""The normalised prompts of a cache: `<cache>/prompts/*.parquet`, and `prompts.json` that says they are complete.

The sources are read on every run (so a changed file is noticed), in a stream: at most one file of rows is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.ledger import Ledger, Reject
from cache_store.storage import Storage
from pipeline.config import Config
from pipeline.errors import BuildFailed, ConfigError
from pipeline.prompts import Prompt, PromptCounts, read_prompts
from pipeline.tables import read_table

RECORD = "prompts/prompts.json"
_ROWS_PER_FILE = 8192
_SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "turns": pa.int32(),
        "system": pa.string(),
        "users": pa.list_(pa.string()),
        "domain": pa.string(),
        "source": pa.string(),
    }
)


@dataclass(slots=True)
class SpooledPrompts:
    """The sources as read now, on local disk; `digest` does not depend on the order of rows."""

    counts: PromptCounts = field(default_factory=PromptCounts)
    files: list[Path] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    first: list[Prompt] = field(default_factory=list)
    """The first accepted prompts, for the preflight."""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class PromptIndex:
    """Which prompts a cache is built from, and where each is stored."""

    ids: Sequence[str]
    turns: Sequence[int]
    """User turns of each prompt."""
    places: Sequence[tuple[str, int]]
    """(object name, row) of each prompt."""
    rejected_ids: frozenset[str]
    """Rows of the sources that are no conversation."""


def spool_prompts(config: Config, scratch: Path, *, keep_first: int) -> SpooledPrompts:
    """Read every source into Parquet files below `scratch`.

    Raises ConfigError when a source is missing or holds no usable prompt.
    """
    spooled = SpooledPrompts()
    total = 0
    rows: list[Prompt] = []
    for item in read_prompts(
        config.prompts.sources,
        limit=config.prompts.limit,
        endpoint_url=config.cache.endpoint_url,
        counts=spooled.counts,
    ):
        if isinstance(item, Reject):
            spooled.rejects.append(item)
            continue
        # A sum of hashes: the same set of prompts in any order has the same digest.
        total = (total + int.from_bytes(item.digest(), "big")) % 2**256
        if len(spooled.first) < keep_first:
            spooled.first.append(item)
        rows.append(item)
        if len(rows) == _ROWS_PER_FILE:
            _spool_file(spooled, scratch, rows)
            rows = []
    if rows:
        _spool_file(spooled, scratch, rows)
    if not spooled.counts.accepted:
        reasons = f"; the first: {spooled.rejects[0].source}: {spooled.rejects[0].reason}" if spooled.rejects else ""
        raise ConfigError(
            f"prompts.sources: no usable prompt in {list(config.prompts.sources)}: "
            f"{spooled.counts.rejected} rows rejected{reasons}"
        )
    spooled.digest = f"{total:064x}"
    return spooled


def _spool_file(spooled: SpooledPrompts, scratch: Path, rows: list[Prompt]) -> None:
    path = scratch / f"{len(spooled.files):05d}.parquet"
    table = pa.Table.from_pylist([{**asdict(row), "turns": len(row.users)} for row in rows], schema=_SCHEMA)
    pq.write_table(table, path, compression="zstd")
    spooled.files.append(path)


def publish_prompts(storage: Storage, spooled: SpooledPrompts) -> None:
    """Store the spooled prompts and rejects in the cache, once; the record is written last."""
    if storage.exists(RECORD):
        stored = json.loads(storage.read(RECORD))["digest"]
        if stored != spooled.digest:
            raise BuildFailed(
                f"{storage.url}/{RECORD}: built from other prompts (digest {stored[:12]}, the sources now give "
                f"{spooled.digest[:12]}); use another cache.url"
            )
        return
    names = []
    for path in spooled.files:
        names.append(f"prompts/{spooled.digest[:12]}-{path.name}")
        storage.put(names[-1], path)
    if spooled.rejects:
        Ledger(storage).reject(spooled.rejects)
    record = {
        "digest": spooled.digest,
        "counts": asdict(spooled.counts),
        "files": names,
        "rejected_ids": [reject.sample_id for reject in spooled.rejects],
    }
    storage.put(RECORD, json.dumps(record).encode("utf-8"))


def load_index(storage: Storage) -> PromptIndex:
    """The stored prompts' ids, turns and places; their texts stay on disk."""
    record = json.loads(storage.read(RECORD))
    ids: list[str] = []
    turns: list[int] = []
    places: list[tuple[str, int]] = []
    for name in record["files"]:
        table = read_table(storage, name, columns=["sample_id", "turns"])
        ids += table.column("sample_id").to_pylist()
        turns += table.column("turns").to_pylist()
        places += [(name, row) for row in range(table.num_rows)]
    return PromptIndex(ids=ids, turns=turns, places=places, rejected_ids=frozenset(record["rejected_ids"]))


def load_prompts(storage: Storage, places: Sequence[tuple[str, int]]) -> list[Prompt]:
    """The prompts at the given places, in that order."""
    tables: dict[str, pa.Table] = {}
    return [_load(tables, storage, name, row) for name, row in places]


def _load(tables: dict[str, pa.Table], storage: Storage, name: str, row: int) -> Prompt:
    if name not in tables:
        tables[name] = read_table(storage, name)
    value = tables[name].slice(row, 1).to_pylist()[0]
    return Prompt(
        sample_id=value["sample_id"],
        system=value["system"],
        users=tuple(value["users"]),
        domain=value["domain"],
        source=value["source"],
    )


def iterate_spooled(spooled: SpooledPrompts) -> Iterator[tuple[str | None, tuple[str, ...]]]:
    """(system, users) of every spooled prompt, in order."""
    for path in spooled.files:
        for value in pq.read_table(path, columns=["system", "users"]).to_pylist():
            yield value["system"], tuple(value["users"])
