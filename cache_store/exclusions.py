"""Samples that training does without: an explicit, immutable list, so that every rank leaves out the same ones.

A list is written once under a name made from its content, and a run names it in its config: no rank can read another
list than the others, and a run that goes on later reads the same one. The place of an excluded sample in the order is
taken by the next sample of the run's selection, so the number of samples, the order, and the state of a run stay valid
when a list is introduced in the middle of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import CacheError, CacheIncomplete
from cache_store.manifest import ShardSummary
from cache_store.schema import FORMAT_VERSION, parse_versioned
from cache_store.storage import Storage

EXCLUSIONS = "exclusions/"


@dataclass(frozen=True, order=True, slots=True)
class Exclusion:
    """One sample of one shard; it does not apply to the same sample in another shard, where it was built anew."""

    sample_id: str
    shard: str
    """Object name of the damaged shard."""
    reason: str


def write_exclusions(storage: Storage, exclusions: Sequence[Exclusion]) -> str:
    """Store a list; returns its object name, which a run's config then gives."""
    listed = [asdict(exclusion) for exclusion in sorted(exclusions)]
    content = (json.dumps({"format_version": FORMAT_VERSION, "samples": listed}, ensure_ascii=False) + "\n").encode()
    name = _object_name(content)
    storage.put(name, content)
    return name


def load_exclusions(storage: Storage, name: str) -> tuple[Exclusion, ...]:
    """A list by its object name. Raises NotFound, and CacheError when its content is not the one of its name."""
    content, where = storage.read(name), storage.path(name)
    if _object_name(content) != name:
        raise CacheError(f"{where}: its content has changed since it was written; write it again: cache_store repair")
    data, _ = parse_versioned(content, where)
    try:
        return tuple(Exclusion(**item) for item in data["samples"])
    except (KeyError, TypeError) as error:
        raise CacheError(f"{where}: not a list of exclusions: {error}") from error


def excluded_rows(table: pa.Table, shards: Sequence[ShardSummary], exclusions: Sequence[Exclusion]) -> np.ndarray:
    """bool [n]: rows of an index that a list excludes."""
    rows = np.zeros(len(table), dtype=bool)
    where = {(exclusion.sample_id, exclusion.shard) for exclusion in exclusions}
    ids = pa.array(sorted({sample_id for sample_id, _ in where}), pa.large_string())
    for row in np.flatnonzero(pc.is_in(table["sample_id"], value_set=ids).to_numpy()):
        place = int(row)
        rows[place] = (table["sample_id"][place].as_py(), shards[table["shard"][place].as_py()].name) in where
    return rows


def substitute(positions: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """The same places with every excluded position replaced by the next one that is not, around the end.

    positions: int64 [k], rows of a cache in the order of a selection; excluded: bool over all rows of the cache.
    Raises CacheIncomplete when nothing is left.
    """
    bad = excluded[positions]
    if not bad.any():
        return positions
    good = np.flatnonzero(~bad)
    if not len(good):
        raise CacheIncomplete(f"all {len(positions)} selected samples are excluded")
    following = np.searchsorted(good, np.flatnonzero(bad)) % len(good)
    replaced = positions.copy()
    replaced[bad] = positions[good[following]]
    return replaced


def _object_name(content: bytes) -> str:
    return f"{EXCLUSIONS}{hashlib.sha256(content).hexdigest()[:16]}.json"
