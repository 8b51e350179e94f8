"""Another container, other codecs, fewer layers: a new cache from an existing one, without a GPU.

Ids, tokens, masks and metadata stay. A field whose bounded-loss codec stays is copied as it is stored, since coding its
states again would add to the error; what was lossy once is named in the new cache's identity for good.
Legend: L captured layers, T tokens, D hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cache_store.calibration import (
    CALIBRATION,
    CALIBRATION_SAMPLES,
    Calibration,
    calibrate,
    commit_calibration,
    load_calibration,
)
from cache_store.errors import CacheError, SampleRejected
from cache_store.fields import Planes, StoredPlanes, TensorError
from cache_store.frame import Frame
from cache_store.identity import fingerprint
from cache_store.ledger import Ledger, Reject, seal
from cache_store.manifest import Manifest
from cache_store.reader import CacheReader
from cache_store.row_codec import select_layers
from cache_store.schema import EXACT_CODECS, CacheSpec, TargetSample
from cache_store.shard import CopiedField, CopiedFields, StoredSample
from cache_store.storage import Storage
from cache_store.writer import CacheWriter, create_cache

FETCHES_AT_ONCE = 4
"""Samples read ahead of the encoder: what the conversion holds in memory, beside one shard's records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What shall be different; None: as in the source."""

    format: str | None = None
    codec: str | None = None
    last_codec: str | None = None
    last_hidden: str | None = None
    layer_ids: tuple[int, ...] | None = None
    shard_bytes: int | None = None


class Source(Protocol):
    """A cache to convert: `StoredCache`, or the reference's (`reference_cache.py`)."""

    spec: CacheSpec

    @property
    def ids(self) -> Sequence[str]:
        """Sample ids by position."""

    def rejected(self) -> list[Reject]:
        """Inputs that did not make it into the source."""

    def sample(self, position: int) -> tuple[TargetSample, StoredSample | None]:
        """A sample, and how it is stored where that can be copied. Raises ShardCorrupt."""

    def scales(self) -> Calibration:
        """The source's channel scales."""

    def errors(self) -> tuple[TensorError, ...]:
        """What the source's codecs were measured to lose."""


class StoredCache:
    """A Target Cache as a source. Raises CacheIncomplete when it is not sealed, like its reader."""

    def __init__(self, storage: Storage) -> None:
        self.reader = CacheReader(storage, verify="always")
        self.spec = self.reader.spec

    @property
    def ids(self) -> Sequence[str]:
        """Sample ids by position."""
        return self.reader.ids

    def rejected(self) -> list[Reject]:
        """Inputs rejected by the source's build and not in the cache after all."""
        ids = set(self.reader.ids)
        return [reject for name, reject in Ledger(self.reader.storage).rejected().items() if name not in ids]

    def sample(self, position: int) -> tuple[TargetSample, StoredSample | None]:
        """A sample decoded, and as stored with its planes in memory of their own."""
        stored = self.reader.fetch(position)
        own = replace(stored, captured=_in_memory(stored.captured), last=_in_memory(stored.last))
        return self.reader.decode(position, own), own

    def scales(self) -> Calibration:
        """The source's channel scales."""
        return load_calibration(self.reader.storage, self.spec)

    def errors(self) -> tuple[TensorError, ...]:
        """Of the sealed cache."""
        return self.reader.manifest.errors if self.reader.manifest is not None else ()


def converted_spec(source: CacheSpec, changes: Changes) -> CacheSpec:
    """Settings of the new cache. Raises CacheError for what the source cannot give."""
    layers = source.layer_ids if changes.layer_ids is None else changes.layer_ids
    if missing := sorted(set(layers) - set(source.layer_ids)):
        raise CacheError(f"layers {missing} are not in the source, which has {list(source.layer_ids)}")
    last_hidden = changes.last_hidden or source.last_hidden
    if (source.last_hidden, last_hidden) == ("needed", "all"):
        raise CacheError("the source holds the last hidden state only where it is needed; 'all' cannot be made of it")
    codec, last_codec = changes.codec or source.codec, changes.last_codec or source.last_codec
    fields = (
        ("captured layers", source.codec, codec, True),
        ("last hidden state", source.last_codec, last_codec, source.last_hidden == last_hidden),
    )
    for what, old, new, same_rows in fields:
        if old not in EXACT_CODECS and new not in EXACT_CODECS and (old != new or not same_rows):
            raise CacheError(
                f"the source's {what} are {old} already, and {new} would add to their error; choose {old} with the "
                f"same rows, or an exact codec ({', '.join(EXACT_CODECS)})"
            )
    origin = {"fingerprint": fingerprint(source), "codec": source.codec, "last_codec": source.last_codec}
    return CacheSpec(
        layer_ids=tuple(layers),
        hidden_size=source.hidden_size,
        num_target_layers=source.num_target_layers,
        vocab_size=source.vocab_size,
        format=changes.format or source.format,
        codec=codec,
        last_codec=last_codec,
        last_hidden=last_hidden,
        shard_bytes=changes.shard_bytes or source.shard_bytes,
        identity={**source.identity, "converted_from": [*source.identity.get("converted_from", []), origin]},
    )


def convert(
    source: Source, target: Storage, changes: Changes, progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Write, or go on writing, the new cache and seal it; repeating an interrupted call continues it.

    progress is called with (samples done, samples in all). Samples that the new container or the rules of a cache do
    not admit are rejected, with the reason, at stage `convert`. Raises CacheMismatch when another cache is there.
    """
    spec = create_cache(target, converted_spec(source.spec, changes))
    _provide_scales(source, target, spec)
    ledger = Ledger(target)
    rejects = {reject.sample_id: reject for reject in source.rejected()}
    ledger.reject([rejects[name] for name in ledger.pending(rejects)])
    pending = set(ledger.pending(source.ids))
    positions = [position for position, name in enumerate(source.ids) if name in pending]
    if positions:
        ledger.reject(_write(source, positions, CacheWriter(target, spec), progress))
    return seal(target, expected_ids=[*source.ids, *rejects])


def _write(
    source: Source, positions: list[int], writer: CacheWriter, progress: Callable[[int, int], None] | None
) -> list[Reject]:
    """Write the samples at the positions; returns those that the new cache does not admit."""
    copier, total = _Copier(source, writer.spec), len(source.ids)
    found: list[Reject] = []
    with writer:
        for done, (sample, stored) in enumerate(_ahead(source, positions), start=total - len(positions) + 1):
            copied = copier.fields(stored, len(sample.input_ids))
            try:
                writer.write(_reduced(sample, source.spec, writer.spec), copied)
            except SampleRejected as error:
                found.append(Reject(sample_id=sample.sample_id, stage="convert", reason=error.reason))
            if progress is not None:
                progress(done, total)
    return found


def _provide_scales(source: Source, target: Storage, spec: CacheSpec) -> None:
    """Channel scales of the new cache: the source's for fields that are copied, measured on its samples for others."""
    if not spec.calibrated or not source.ids or target.exists(CALIBRATION):
        return
    old, where = source.scales(), [source.spec.layer_ids.index(layer) for layer in spec.layer_ids]
    captured = old.captured[where] if old.captured is not None and spec.codec == source.spec.codec else None
    last = old.last if spec.last_codec == source.spec.last_codec else None
    if (spec.codec == "i8cr" and captured is None) or (spec.last_codec == "i8cr" and last is None):
        spread = np.linspace(0, len(source.ids) - 1, min(len(source.ids), CALIBRATION_SAMPLES)).astype(int)
        chosen = (_reduced(source.sample(int(position))[0], source.spec, spec) for position in spread)
        measured = calibrate(spec, chosen)
        captured = measured.captured if captured is None else captured
        last = measured.last if last is None else last
    commit_calibration(target, spec, Calibration(captured=captured, last=last))


def _reduced(sample: TargetSample, source: CacheSpec, spec: CacheSpec) -> TargetSample:
    """The sample with the layers of the new cache only."""
    if spec.layer_ids == source.layer_ids:
        return sample
    where = [source.layer_ids.index(layer) for layer in spec.layer_ids]
    return replace(sample, hidden_states=np.ascontiguousarray(sample.hidden_states[where]))


class _Copier:
    """Takes a sample's lossy planes over as they are stored."""

    def __init__(self, source: Source, spec: CacheSpec) -> None:
        old = source.spec
        self._channels, self._layers = old.hidden_size, old.num_layers
        self._where = [old.layer_ids.index(layer) for layer in spec.layer_ids]
        self._captured = old.codec not in EXACT_CODECS and old.codec == spec.codec
        self._last = old.last_codec not in EXACT_CODECS and old.last_codec == spec.last_codec
        self._names = [str(layer) for layer in spec.layer_ids]
        self._errors = {error.tensor: error for error in source.errors()}

    def fields(self, stored: StoredSample | None, tokens: int) -> CopiedFields | None:
        """What of the sample is copied, if anything is."""
        if stored is None or not (self._captured or self._last):
            return None
        captured = last = None
        if self._captured:
            captured = self._copy(_in_memory(stored.captured), (self._layers, tokens), self._where, self._names)
        if self._last:
            planes = _in_memory(stored.last)
            captured_rows = planes[0].size // self._channels
            last = self._copy(planes, (1, captured_rows), [0], ["last"])
        return CopiedFields(captured, last)

    def _copy(self, planes: Planes, shape: tuple[int, int], where: list[int], names: list[str]) -> CopiedField:
        kept, outliers = select_layers(planes, (*shape, self._channels), where)
        errors = []
        for name, count in zip(names, outliers, strict=True):
            known = self._errors.get(name)  # measured when the states were there: mean and bound hold for each part
            mean, largest = (0.0, 0.0) if known is None else (known.mean, known.max)
            errors.append(TensorError(tensor=name, rows=shape[1], outliers=int(count), mean=mean, max=largest))
        return kept, tuple(errors)


def _ahead(source: Source, positions: list[int]) -> Iterator[tuple[TargetSample, StoredSample | None]]:
    """The samples of the positions in order, a few of them fetched and decoded beforehand."""
    waiting: deque[Future[tuple[TargetSample, StoredSample | None]]] = deque()
    with ThreadPoolExecutor(max_workers=FETCHES_AT_ONCE) as pool:
        for position in positions:
            waiting.append(pool.submit(source.sample, position))
            if len(waiting) > FETCHES_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _in_memory(planes: StoredPlanes) -> Planes:
    """Planes decompressed; what a frame opens is copied, since that memory belongs to the thread."""
    high, low = planes
    return (high.open().copy() if isinstance(high, Frame) else high), low
