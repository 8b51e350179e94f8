"""How large a cache will be, before anything expensive starts.

The factors were measured on SmolLM2-135M-Instruct (layers 1, 8, 15, 22, 28 and the last hidden state; chat text).
They depend on the shape of the values' distribution only; a few samples of the real target give better ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cache_store.calibration import calibrate, field_codecs
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import needed_positions

BF16_BYTES = 2
TOKEN_BYTES = 2.2
"""input_ids and loss mask of a token, compressed."""
SAMPLE_BYTES = {"parquet": 1500, "tar": 6500}
"""Page headers and footer entries, or members' headers and padding; commit record and index line of a sample."""
NOMINAL_SAMPLE_TOKENS = 512
"""Tokens per sample where the caller does not know the number of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """Stored bytes per raw byte, of the captured layers and of the last hidden state."""

    captured: float
    last: float


MEASURED = {
    "bss1": Ratios(captured=0.69, last=0.697),
    "raw": Ratios(captured=1.0, last=1.0),
    "i8cr": Ratios(captured=0.474, last=0.474),
    "f8r": Ratios(captured=0.430, last=0.430),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Sizes in bytes."""

    raw_bytes: int
    """bf16 states of every token, uncompressed: captured layers and last hidden state."""
    stored_bytes: int
    shards: int


def estimate_bytes(
    spec: CacheSpec,
    tokens: int,
    supervised_fraction: float,
    *,
    samples: int | None = None,
    ratios: Ratios | None = None,
) -> Estimate:
    """Size of a cache of `tokens` tokens, of which `supervised_fraction` (0..1) are supervised."""
    known = ratios or Ratios(captured=MEASURED[spec.codec].captured, last=MEASURED[spec.last_codec].last)
    count = -(-tokens // NOMINAL_SAMPLE_TOKENS) if samples is None else samples
    vector = spec.hidden_size * BF16_BYTES
    kept = 1.0 if spec.last_hidden == "all" else supervised_fraction
    per_token = vector * (spec.num_layers * known.captured + kept * known.last) + TOKEN_BYTES
    stored = round(tokens * per_token + count * SAMPLE_BYTES[spec.format])
    raw = tokens * vector * (spec.num_layers + 1)
    return Estimate(raw_bytes=raw, stored_bytes=stored, shards=-(-stored // spec.shard_bytes))


def measure_ratios(spec: CacheSpec, samples: Sequence[TargetSample]) -> Ratios:
    """The factors of real samples of a target, by compressing them as a shard does."""
    if not samples:
        return Ratios(captured=0.0, last=0.0)
    captured, last = [0, 0], [0, 0]
    codecs = field_codecs(spec, calibrate(spec, samples))
    for sample in samples:
        final = sample.last_hidden_state
        if spec.last_hidden == "needed":
            final = final[needed_positions(sample.loss_mask)]
        for bits, field, total in (
            (sample.hidden_states, codecs.captured, captured),
            (final[None], codecs.last, last),
        ):
            (high, low), _ = field.encode(bits)
            total[0] += bits.nbytes
            total[1] += low.nbytes + _zstd_bytes(high)
    return Ratios(captured=captured[1] / max(captured[0], 1), last=last[1] / max(last[0], 1))


def _zstd_bytes(plane: np.ndarray) -> int:
    return len(pa.Codec("zstd", compression_level=1).compress(plane.tobytes(), asbytes=True)) if plane.size else 0
