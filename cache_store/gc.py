"""Garbage of a cache: what crashes left behind, seen by no reader. Nothing is deleted unless asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from cache_store.errors import CacheError, NotFound, StorageError
from cache_store.ledger import record_names
from cache_store.manifest import INDEXES, MANIFEST, SHARDS, Manifest
from cache_store.storage import TEMPORARY, Storage, Upload
from cache_store.writer import load_spec, record_name

ASIDE = "aside/"
"""Where `repair` moves what is damaged."""
SAFE_AGE_S = 24 * 3600.0
"""Older than anything that a running build may still hold open: a shard is recorded seconds after it is published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """One object that belongs to nothing."""

    kind: str
    """orphan (a shard without record), unfinished (a temporary file), upload (parts of an upload), old-index, aside."""
    name: str
    size: int
    """Bytes; 0 for parts of uploads, whose size stores do not tell."""
    age_s: float | None
    """Since it was written; None where the store does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GcReport:
    """What was found, and what was done about it."""

    garbage: tuple[Garbage, ...]
    """Old enough to go."""
    young: tuple[Garbage, ...]
    """Perhaps still in use: kept, like everything whose age is not known."""
    deleted: int
    freed_bytes: int


def collect_garbage(
    storage: Storage, *, delete: bool = False, older_than_s: float = SAFE_AGE_S, aside: bool = False
) -> GcReport:
    """Find garbage older than `older_than_s`, and delete it if told to. aside: also what `repair` moved aside.

    Safe beside a running build when `older_than_s` exceeds the longest time that it keeps a shard open. Raises
    NotFound when there is no cache at this place, so that a mistyped URL deletes nothing.
    """
    _check_place(storage)
    found, now = [], time.time()
    for kind, name, size, modified, upload in _candidates(storage, aside):
        found.append(
            (Garbage(kind=kind, name=name, size=size, age_s=None if modified is None else now - modified), upload)
        )
    old = [(item, upload) for item, upload in found if item.age_s is not None and item.age_s >= older_than_s]
    deleted = freed = 0
    if delete:
        for item, upload in old:
            if _delete(storage, item, upload):
                deleted, freed = deleted + 1, freed + item.size
    kept = {id(item) for item, _ in old}
    return GcReport(
        garbage=tuple(item for item, _ in old),
        young=tuple(item for item, _ in found if id(item) not in kept),
        deleted=deleted,
        freed_bytes=freed,
    )


def _check_place(storage: Storage) -> None:
    try:
        load_spec(storage)
    except StorageError:
        raise
    except CacheError:  # damaged, but a cache
        return


def _candidates(storage: Storage, aside: bool) -> Iterator[tuple[str, str, int, float | None, Upload | None]]:
    recorded = set(record_names(storage))
    for info in storage.list(SHARDS):
        if record_name(info.name) not in recorded and not storage.exists(record_name(info.name)):
            yield "orphan", info.name, info.size, info.modified, None
    for info in storage.list(f"{TEMPORARY}/"):
        yield "unfinished", info.name, info.size, info.modified, None
    used = _used_index(storage)
    for info in storage.list(INDEXES):
        if used is not None and info.name != used:
            yield "old-index", info.name, info.size, info.modified, None
    for upload in storage.unfinished_uploads(""):
        yield "upload", upload.name, 0, upload.started, upload
    for info in storage.list(ASIDE) if aside else ():
        yield "aside", info.name, info.size, info.modified, None


def _used_index(storage: Storage) -> str | None:
    """The index that readers open; None while there is no sound manifest, which `repair` may need indexes for."""
    try:
        return Manifest.from_json(storage.read(MANIFEST)).index
    except NotFound:
        return None
    except StorageError:
        raise
    except CacheError:
        return None


def _delete(storage: Storage, item: Garbage, upload: Upload | None) -> bool:
    if upload is not None:
        storage.abort_upload(upload)
        return True
    if item.kind == "orphan" and storage.exists(record_name(item.name)):  # its writer has come back to life
        return False
    try:
        storage.delete(item.name)
    except NotFound:  # somebody else was faster
        return False
    return True
