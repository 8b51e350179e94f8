"""The samples of a run: a selection of one cache, or of several mixed with weights, numbered 0..n-1 in every epoch.

Which sample stands at (epoch, position) is a pure function of the caches' contents and the weights, so every rank and
every loader worker finds the same one without talking to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_store import index
from cache_store.disk_cache import DiskCacheOptions
from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch
from cache_store.exclusions import substitute
from cache_store.identity import differences, fingerprint
from cache_store.order import epoch_order
from cache_store.reader import CacheReader, Verify
from cache_store.schema import CacheSpec
from cache_store.selection import Selection, select
from cache_store.storage import Storage

TARGET_FIELDS = ("layer_ids", "hidden_size", "num_target_layers", "vocab_size")
TARGET_IDENTITY = (
    "target",
    "architecture",
    "weights",
    "config",
    "tokenizer",
    "chat_template",
    "dtype",
    "quantization",
    "norm",
)
"""Identity fields that say which target, and which of its states: caches that are mixed must agree on them. Prompts,
sampling, versions, codec and container may differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One cache of a mix."""

    storage: Storage
    selection: Selection = field(default_factory=Selection)
    weight: float = 1.0
    """How often each selected sample stands in an epoch: 2 twice; 0.5 in every second epoch, half of them in each."""
    masks: str = "stored"
    """Loss masks (`masks.py`)."""
    exclusions: str | None = None
    """List of damaged samples to do without: the next selected sample stands in each one's place (`exclusions.py`)."""
    disk_cache: DiskCacheOptions | None = None
    """Keep what is read on a local disk."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Where the samples of a source went: total = used + the sum of dropped."""

    url: str
    total: int
    used: int
    dropped: dict[str, int]
    per_epoch: int
    """Samples that an epoch takes from it, by its weight."""
    substituted: int
    """Of the used: excluded samples, each with another one in its place."""


class SampleSet:
    """Opens the sources and numbers their samples; safe to use from several threads.

    Raises CacheMismatch for caches of different targets or layers, CacheError for an impossible weight, CacheIncomplete
    when no sample is left, and whatever `CacheReader` and `select` raise.
    """

    def __init__(self, sources: Sequence[Source], *, verify: Verify = "first", allow_unsealed: bool = False) -> None:
        if not sources:
            raise CacheError("a run needs at least one cache")
        for source in sources:
            if not 0.0 < source.weight < float("inf"):
                raise CacheError(f"{source.storage.url}: weight is {source.weight}, wanted a positive number")
        self.sources = tuple(sources)
        self.readers = [
            CacheReader(
                source.storage,
                verify=verify,
                allow_unsealed=allow_unsealed,
                masks=source.masks,
                exclusions=source.exclusions,
                disk_cache=source.disk_cache,
            )
            for source in sources
        ]
        for reader in self.readers[1:]:
            check_same_target(self.readers[0], reader)
        found = [select(r.index, source.selection) for r, source in zip(self.readers, sources, strict=True)]
        self._selected = [selected.positions for selected in found]  # what a resumed run must find, damaged or not
        self._chosen = [substitute(rows, r.excluded) for rows, r in zip(self._selected, self.readers, strict=True)]
        shares = [round(s.weight * len(chosen)) for s, chosen in zip(sources, self._chosen, strict=True)]
        self._starts = np.concatenate([[0], np.cumsum(shares)]).astype(np.int64)
        self._orders: list[np.ndarray] = []
        for number, (chosen, share) in enumerate(zip(self._chosen, shares, strict=True)):
            # A whole number of rounds needs no order; a part of one must not be the first ids of the alphabet.
            whole = not len(chosen) or share % len(chosen) == 0
            self._orders.append(chosen if whole else chosen[epoch_order(number, 0, len(chosen))])
        self.reports = [
            SourceReport(r.storage.url, len(r), len(s.positions), s.dropped, share, int(r.excluded[s.positions].sum()))
            for r, s, share in zip(self.readers, found, shares, strict=True)
        ]
        if len(self) == 0:
            raise CacheIncomplete(f"no samples to train on: {'; '.join(map(describe, self.reports))}")

    def __len__(self) -> int:
        """Samples of an epoch."""
        return int(self._starts[-1])

    @property
    def spec(self) -> CacheSpec:
        """Settings of the first cache: layers, sizes and target are those of all."""
        return self.readers[0].spec

    def find(self, epoch: int, position: int) -> tuple[CacheReader, int]:
        """The cache, and the position in it, of a sample of an epoch. Raises CacheError outside the epoch."""
        if not 0 <= position < len(self):
            raise CacheError(f"position {position} is outside the {len(self)} samples of an epoch")
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self.readers[number], int(self._rows(number, epoch, np.int64(position)))

    def tokens(self, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Lengths of samples, int64, for epochs and positions of the same shape [k]."""
        return self._column(epochs, positions, [reader.tokens for reader in self.readers])

    def stored_bytes(self, epochs: np.ndarray, positions: np.ndarray) -> int:
        """Bytes that these samples take in their shards."""
        return int(self._column(epochs, positions, [reader.lengths for reader in self.readers]).sum())

    def _column(self, epochs: np.ndarray, positions: np.ndarray, columns: Sequence[np.ndarray]) -> np.ndarray:
        values = np.empty(len(positions), dtype=np.int64)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(numbers):
            of_it = numbers == number
            rows = self._rows(int(number), epochs[of_it], positions[of_it])
            values[of_it] = columns[number][rows]
        return values

    def loss_mask(self, epoch: int, position: int) -> np.ndarray:
        """bool [T], from the index alone."""
        reader, row = self.find(epoch, position)
        return reader.loss_mask(row)

    def identity(self) -> dict[str, Any]:
        """Flat JSON: what a resumed run must find unchanged, of every source."""
        facts: dict[str, Any] = {}
        for number, (reader, source) in enumerate(zip(self.readers, self.sources, strict=True)):
            name = f"cache{number or ''}"
            ids = hashlib.sha256()
            for sample_id in reader.index["sample_id"].take(self._selected[number]).to_pylist():
                ids.update(sample_id.encode() + b"\n")
            facts |= {f"{name}.fingerprint": fingerprint(reader.spec), f"{name}.samples": len(self._selected[number])}
            facts |= {f"{name}.ids": ids.hexdigest(), f"{name}.weight": source.weight, f"{name}.masks": source.masks}
            if source.masks != "stored":
                supervised = index.column(reader.index, "supervised")[self._selected[number]]
                facts[f"{name}.supervised"] = int(supervised.sum())
        return facts

    def _rows(self, number: int, epoch: Any, position: Any) -> Any:
        """Positions in a source's cache. Epochs walk through its samples one after another, round after round."""
        order, share = self._orders[number], self._starts[number + 1] - self._starts[number]
        return order[(epoch * share + position - self._starts[number]) % len(order)]


def describe(report: SourceReport) -> str:
    """A source's report in one line."""
    lost = "".join(f", {count} {reason}" for reason, count in report.dropped.items())
    weighted = "" if report.per_epoch == report.used else f", {report.per_epoch} per epoch"
    damaged = f", {report.substituted} damaged and replaced by others" if report.substituted else ""
    return f"{report.url}: {report.used} of {report.total} samples{lost}{weighted}{damaged}"


def check_same_target(first: CacheReader, other: CacheReader) -> None:
    """Refuse to mix caches of other layers or targets. Raises CacheMismatch naming every field that differs."""
    wanted = {*TARGET_FIELDS, *(f"identity.{name}" for name in TARGET_IDENTITY)}
    found = [
        f"{name} is {ours!r} in the first and {theirs!r} in the second"
        for name, ours, theirs in differences(first.spec, other.spec)
        if name in wanted
    ]
    if found:
        raise CacheMismatch(
            f"{first.storage.url} and {other.storage.url} cannot be mixed: {'; '.join(found)}; build both from the "
            "same target with the same layers"
        )
