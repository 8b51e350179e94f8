"""What two caches have in common and where they differ: settings, ids, tokens, masks, content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_store import index
from cache_store.identity import differences
from cache_store.reader import CacheReader
from cache_store.schema import TargetSample
from cache_store.shard import needed_positions

_STORAGE_FIELDS = ("format", "codec", "last_codec", "last_hidden", "layer_ids", "hidden_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheDiff:
    """Differences of a cache `b` from a cache `a`; empty tuples where there are none."""

    settings: tuple[tuple[str, Any, Any], ...]
    """(field, value in a, value in b), identity fields as identity.<field>."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tokens: tuple[tuple[str, int, int], ...]
    """(id, tokens in a, tokens in b) of samples of different length."""
    masks: tuple[str, ...]
    """Ids whose supervised positions differ."""
    content: tuple[str, ...]
    """Ids whose content differs; by `compared`."""
    common: int
    """Samples in both."""
    compared: str
    """checksums: stored bytes; values: decoded tokens, masks and states; nothing: the caches are stored in different
    ways and values were not asked for."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        found = (self.settings, self.only_a, self.only_b, self.tokens, self.masks, self.content)
        return not any(found)


def diff_caches(
    a: CacheReader, b: CacheReader, *, values: bool = False, progress: Callable[[int, int], None] | None = None
) -> CacheDiff:
    """Compare by indexes alone, or (values) by reading every common sample and comparing what it decodes to.

    Checksums are compared where both caches store samples in the same way. Raises ShardCorrupt when a sample that is
    read is damaged.
    """
    places_a, places_b = ({name: number for number, name in enumerate(reader.ids)} for reader in (a, b))
    common = [name for name in a.ids if name in places_b]
    rows_a = np.array([places_a[name] for name in common], dtype=np.int64)
    rows_b = np.array([places_b[name] for name in common], dtype=np.int64)
    lengths = zip(common, a.tokens[rows_a].tolist(), b.tokens[rows_b].tolist(), strict=True)
    spans_a, spans_b = (r.index["spans"].take(rows).to_pylist() for r, rows in ((a, rows_a), (b, rows_b)))
    alike = all(getattr(a.spec, name) == getattr(b.spec, name) for name in _STORAGE_FIELDS)
    if values:
        compared, content = "values", _different_values(a, b, common, (rows_a, rows_b), progress)
    elif alike:
        sums = (index.column(r.index, "checksum")[rows] for r, rows in ((a, rows_a), (b, rows_b)))
        compared, content = "checksums", [common[i] for i in np.flatnonzero(np.not_equal(*sums))]
    else:
        compared, content = "nothing", []
    return CacheDiff(
        settings=tuple(differences(a.spec, b.spec)),
        only_a=tuple(name for name in a.ids if name not in places_b),
        only_b=tuple(name for name in b.ids if name not in places_a),
        tokens=tuple(item for item in lengths if item[1] != item[2]),
        masks=tuple(name for name, x, y in zip(common, spans_a, spans_b, strict=True) if x != y),
        content=tuple(content),
        common=len(common),
        compared=compared,
    )


def _different_values(
    a: CacheReader,
    b: CacheReader,
    names: list[str],
    rows: tuple[np.ndarray, np.ndarray],
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    layers = sorted(set(a.spec.layer_ids) & set(b.spec.layer_ids))
    chosen = [[reader.spec.layer_ids.index(layer) for layer in layers] for reader in (a, b)]
    found = []
    for number, (name, row_a, row_b) in enumerate(zip(names, *rows, strict=True), start=1):
        if not _same_values(a.read(int(row_a)), b.read(int(row_b)), chosen):
            found.append(name)
        if progress is not None:
            progress(number, len(names))
    return found


def _same_values(a: TargetSample, b: TargetSample, layers: list[list[int]]) -> bool:
    """Bit for bit, on the layers that both have and where the loss can use the last hidden state."""
    if not (np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)):
        return False
    rows = needed_positions(a.loss_mask)
    same_last = np.array_equal(a.last_hidden_state[rows], b.last_hidden_state[rows])
    return same_last and np.array_equal(a.hidden_states[layers[0]], b.hidden_states[layers[1]])
