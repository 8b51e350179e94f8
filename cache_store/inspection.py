"""The facts that `cache_store inspect` and `cache_store sample` show, as plain data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_store import codec, index
from cache_store.fields import TensorError
from cache_store.identity import fingerprint
from cache_store.ledger import Ledger, count_rejects
from cache_store.reader import CacheReader
from cache_store.schema import TargetSample

PROBED_SAMPLES = 8
"""Samples whose states are read for the facts per layer, spread over the cache."""
HISTOGRAM_BINS = 12
STORED_AS = ("format", "codec", "last_codec", "last_hidden")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """Values of one captured layer (or `last`) over the probed samples."""

    layer: str
    rms: float
    max_abs: float
    max_abs_after_first: float
    """Without the first token of each sample, which often carries massive activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBin:
    """Samples with low <= tokens <= high."""

    low: int
    high: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a person wants to know of a cache before paying for training on it."""

    url: str
    sealed: bool
    fingerprint: str
    settings: dict[str, Any]
    identity: dict[str, Any]
    samples: int
    tokens: int
    supervised_tokens: int
    shards: int
    stored_bytes: int
    raw_bytes: int
    """bf16 states of all tokens."""
    duplicates: int
    rejects: dict[str, dict[str, int]]
    """stage -> reason -> count."""
    finish_reasons: dict[str, int]
    length_median: float
    lengths: tuple[LengthBin, ...]
    errors: tuple[TensorError, ...]
    """What bounded-loss codecs lost, as measured when the shards were written; empty where all is exact."""
    layers: tuple[LayerFacts, ...]
    probed_samples: int


def inspect_cache(reader: CacheReader, *, probe: bool = True) -> Inspection:
    """Gather the facts; reads the states of a few samples when `probe`. Raises ShardCorrupt for a damaged one."""
    spec = reader.spec
    settings = {
        name: getattr(spec, name)
        for name in ("layer_ids", "hidden_size", "num_target_layers", "vocab_size", *STORED_AS)
    }
    if reader.manifest is not None:
        duplicates, rejects = reader.manifest.duplicates, reader.manifest.rejects
    else:
        ids = set(reader.ids)
        open_rejects = [reject for name, reject in Ledger(reader.storage).rejected().items() if name not in ids]
        duplicates = sum(shard.num_samples for shard in reader.shards) - len(reader)
        rejects = count_rejects(open_rejects)
    positions = sorted(set(np.linspace(0, len(reader) - 1, PROBED_SAMPLES).astype(int))) if len(reader) else []
    probed = [reader.read(int(position)) for position in positions] if probe else []
    return Inspection(
        url=reader.storage.url,
        sealed=reader.manifest is not None,
        fingerprint=fingerprint(spec),
        settings=settings,
        identity=spec.identity,
        samples=len(reader),
        tokens=int(reader.tokens.sum()),
        supervised_tokens=int(reader.supervised_tokens.sum()),
        shards=len(reader.shards),
        stored_bytes=sum(shard.num_bytes for shard in reader.shards),
        raw_bytes=int(reader.tokens.sum()) * (spec.num_layers + 1) * spec.hidden_size * 2,
        duplicates=duplicates,
        rejects=rejects,
        finish_reasons=index.counts(reader.index, "finish"),
        length_median=float(np.median(reader.tokens)) if len(reader) else 0.0,
        lengths=length_histogram(reader.tokens),
        errors=reader.manifest.errors if reader.manifest is not None else (),
        layers=layer_facts(spec.layer_ids, probed),
        probed_samples=len(probed),
    )


def length_histogram(tokens: np.ndarray) -> tuple[LengthBin, ...]:
    """At most HISTOGRAM_BINS bins of equal whole width that cover all lengths."""
    if not len(tokens):
        return ()
    low, high = int(tokens.min()), int(tokens.max())
    width = -(-(high - low + 1) // HISTOGRAM_BINS)
    counts = np.bincount((tokens - low) // width)
    starts = [low + number * width for number in range(len(counts))]
    return tuple(
        LengthBin(low=start, high=min(start + width - 1, high), samples=int(count))
        for start, count in zip(starts, counts, strict=True)
    )


def layer_facts(layer_ids: tuple[int, ...], samples: list[TargetSample]) -> tuple[LayerFacts, ...]:
    """Facts of each captured layer and of the last hidden state, over the rows that are stored."""
    if not samples:
        return ()
    facts = []
    for number, name in enumerate([*map(str, layer_ids), "last"]):
        squares, count, largest, later = 0.0, 0, 0.0, 0.0
        for sample in samples:
            bits = sample.last_hidden_state if name == "last" else sample.hidden_states[number]
            rows = codec.to_float(bits).astype(np.float64)
            stored = rows.any(axis=1)
            squares += float((rows**2).sum())
            count += int(stored.sum()) * rows.shape[1]
            largest = max(largest, float(np.abs(rows).max()))
            later = max(later, float(np.abs(rows[1:]).max(initial=0.0)))
        rms = float(np.sqrt(squares / count)) if count else 0.0
        facts.append(LayerFacts(layer=name, rms=rms, max_abs=largest, max_abs_after_first=later))
    return tuple(facts)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that is supervised as a whole, or context as a whole."""

    supervised: bool
    ids: list[int]


def segments(sample: TargetSample) -> list[Segment]:
    """A sample's tokens, in order, cut where supervision begins or ends."""
    cuts = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8))) + 1
    bounds = [0, *map(int, cuts), len(sample.input_ids)]
    return [
        Segment(bool(sample.loss_mask[start]), sample.input_ids[start:end].tolist())
        for start, end in itertools.pairwise(bounds)
    ]
