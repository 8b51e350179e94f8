"""The distributions that `cache_store stats` shows, as plain data: lengths from the index, values from some samples.

Legend: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cache_store import codec, index
from cache_store.inspection import LengthBin, length_histogram
from cache_store.reader import CacheReader

MASSIVE = 1000.0
"""A value is massive when it is this many times the median magnitude of its layer (Sun et al. 2024, "Massive
Activations in Large Language Models", take 1000 as well)."""
CHANNELS_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStats:
    """One captured layer (or `last`) over the rows, one per token, that were read."""

    layer: str
    rows: int
    rms: float
    """Of all values."""
    norm_median: float
    """Euclidean norm of a row."""
    norm_p99: float
    norm_max: float
    max_abs: float
    max_abs_after_first: float
    """Without the first token of each sample."""
    massive: int
    """Values beyond MASSIVE times the median magnitude."""
    massive_rows: int
    """Rows that hold one."""
    massive_channels: tuple[int, ...]
    """The channels that hold most of them, at most CHANNELS_SHOWN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """Distributions of a cache."""

    url: str
    samples: int
    tokens: int
    supervised_tokens: int
    lengths: tuple[LengthBin, ...]
    supervised_lengths: tuple[LengthBin, ...]
    """By the supervised tokens of a sample."""
    domains: dict[str, int]
    """Samples of each domain."""
    layers: tuple[LayerStats, ...]
    read_samples: int
    """Samples whose states were read for `layers`."""


def cache_stats(
    reader: CacheReader, *, read_samples: int, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> CacheStats:
    """Gather the distributions; reads the states of `read_samples` samples drawn at random (0: none).

    `progress(done, total)` is called after each. Raises ShardCorrupt for a damaged sample.
    """
    drawn = np.sort(np.random.default_rng(seed).permutation(len(reader))[:read_samples])
    rows: list[list[np.ndarray]] = [[] for _ in range(reader.spec.num_layers + 1)]
    firsts: list[list[np.ndarray]] = [[] for _ in rows]
    for done, position in enumerate(drawn, 1):
        sample = reader.read(int(position))
        for number, bits in enumerate([*sample.hidden_states, sample.last_hidden_state]):
            stored = bits.any(axis=-1)
            rows[number].append(bits[stored])
            firsts[number].append(np.flatnonzero(stored) == 0)
        if progress is not None:
            progress(done, len(drawn))
    names = [*map(str, reader.spec.layer_ids), "last"]
    found = [
        layer_stats(name, np.concatenate(parts), np.concatenate(first))
        for name, parts, first in zip(names, rows, firsts, strict=True)
        if sum(map(len, parts))
    ]
    return CacheStats(
        url=reader.storage.url,
        samples=len(reader),
        tokens=int(reader.tokens.sum()),
        supervised_tokens=int(reader.supervised_tokens.sum()),
        lengths=length_histogram(reader.tokens),
        supervised_lengths=length_histogram(reader.supervised_tokens),
        domains=index.counts(reader.index, "domain"),
        layers=tuple(found),
        read_samples=len(drawn),
    )


def layer_stats(layer: str, bits_RD: np.ndarray, first_R: np.ndarray) -> LayerStats:
    """Facts of rows of bf16 bits; `first_R` (bool) marks the rows of first tokens."""
    values = np.abs(codec.to_float(bits_RD))
    norms = np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))
    massive = values > MASSIVE * float(np.median(values))
    per_channel = massive.sum(axis=0)
    channels = np.argsort(-per_channel, kind="stable")[:CHANNELS_SHOWN]
    return LayerStats(
        layer=layer,
        rows=len(values),
        rms=float(np.sqrt((norms**2).sum() / values.size)),
        norm_median=float(np.median(norms)),
        norm_p99=float(np.quantile(norms, 0.99)),
        norm_max=float(norms.max()),
        max_abs=float(values.max()),
        max_abs_after_first=float(values[~first_R].max(initial=0.0)),
        massive=int(massive.sum()),
        massive_rows=int(massive.any(axis=1).sum()),
        massive_channels=tuple(int(channel) for channel in channels if per_channel[channel]),
    )
