"""Which samples of a cache take part: a pure function of each sample's own id and index row.

Split and fraction hash the id, so they depend neither on the order of the samples nor on what else the cache holds: a
sample stays on its side when the cache grows, and a smaller fraction is a subset of a larger one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store import index
from cache_store.errors import CacheError

Split = Literal["all", "train", "held_out"]
_TURN = re.compile(r"#turn\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Conditions that a sample must all meet."""

    split: Split = "all"
    held_out_fraction: float = 0.0
    """Share of conversations on the held-out side of the split."""
    sample_fraction: float = 1.0
    """Share of conversations kept of those."""
    max_tokens: int | None = None
    """Longer samples are left out (not cut)."""
    domains: tuple[str, ...] = ()
    """Only these; empty: all."""

    def __post_init__(self) -> None:
        wrong = []
        if self.split not in ("all", "train", "held_out"):
            wrong.append(f"split is {self.split!r}, wanted all, train or held_out")
        if not 0.0 <= self.held_out_fraction < 1.0:
            wrong.append(f"held_out_fraction is {self.held_out_fraction}, wanted at least 0 and below 1")
        if not 0.0 < self.sample_fraction <= 1.0:
            wrong.append(f"sample_fraction is {self.sample_fraction}, wanted above 0 and at most 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            wrong.append(f"max_tokens is {self.max_tokens}, wanted at least 1")
        if wrong:
            raise CacheError("selection: " + "; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Selected:
    """The outcome; every sample of the index is in `positions` or counted in `dropped`."""

    positions: np.ndarray
    """int64, ascending."""
    dropped: dict[str, int]
    """reason -> samples, each counted at the first condition that it fails."""


def select(table: pa.Table, selection: Selection) -> Selected:
    """Apply the conditions to an index. Raises CacheError for a domain that no sample of the cache has."""
    kept, dropped = np.ones(len(table), dtype=bool), {}

    def keep(condition: np.ndarray, reason: str) -> None:
        lost = kept & ~condition
        if lost.any():
            dropped[reason] = int(lost.sum())
        kept[lost] = False

    if selection.split == "held_out" or (selection.split == "train" and selection.held_out_fraction > 0):
        held_out = _hashed(table, "split") < selection.held_out_fraction
        other = "train" if selection.split == "held_out" else "held_out"
        keep(held_out if selection.split == "held_out" else ~held_out, f"in the {other} split")
    if selection.sample_fraction < 1.0:
        keep(_hashed(table, "fraction") < selection.sample_fraction, "outside the sample fraction")
    if selection.domains:
        present = set(pc.unique(table["domain"]).to_pylist())
        unknown = sorted(set(selection.domains) - present)
        if unknown and len(table):
            raise CacheError(
                f"selection: no sample has the domain {', '.join(unknown)}; the cache holds "
                f"{', '.join(sorted(map(str, present)))}"
            )
        keep(pc.is_in(table["domain"], pa.array(selection.domains, pa.large_string())).to_numpy(), "of other domains")
    if selection.max_tokens is not None:
        keep(index.column(table, "tokens") <= selection.max_tokens, f"longer than {selection.max_tokens} tokens")
    return Selected(np.flatnonzero(kept), dropped)


def unit_hash(sample_id: str, purpose: str) -> float:
    """A number in [0, 1) from blake2b of the conversation's id: the rows of one conversation share it.

    `purpose` makes independent numbers. A conversation with one row per turn has ids `<id>#turn<k>`.
    """
    key = _TURN.sub("", sample_id).encode()
    digest = hashlib.blake2b(key, digest_size=8, person=purpose.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _hashed(table: pa.Table, purpose: str) -> np.ndarray:
    return np.array([unit_hash(sample_id, purpose) for sample_id in index.column_list(table, "sample_id")])
