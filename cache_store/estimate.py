"""How large a cache will be, before anything expensive starts.

The factors were measured on SmolLM2-135M-Instruct (layers 1, 8, 15, 22, 28 and the last hidden state; chat text).
They depend on the shape of the values' distribution only; a few samples of the real target give better ones.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cache_store.calibration import calibrate, field_codecs
from cache_store.errors import CacheError
from cache_store.frame import literal_frames
from cache_store.schema import CODECS, EXACT_CODECS, FORMATS, LAST_CODECS, LAST_HIDDEN, CacheSpec, TargetSample
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
    "i8cr": Ratios(captured=0.471, last=0.494),
    "f8r": Ratios(captured=0.424, last=0.424),
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


def size_text(count: float) -> str:
    """Bytes for people, in decimal units as disks and bills have them: `37.94 TB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if round(count, 2) < 1000:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"


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
    return len(literal_frames().compress(plane.data)) if plane.size else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """How much text a cache will hold."""

    samples: int
    tokens: int
    supervised: int

    @classmethod
    def of(cls, tokens: np.ndarray, supervised: np.ndarray, samples: np.ndarray | None = None) -> TokenCounts:
        """Totals of a histogram: `samples` rows (None: one) of so many tokens, so many of them supervised. [n] each."""
        times = np.ones(len(tokens), np.int64) if samples is None else samples.astype(np.int64)
        return cls(
            samples=int(times.sum()), tokens=int((tokens * times).sum()), supervised=int((supervised * times).sum())
        )

    def scaled(self, factor: float) -> TokenCounts:
        """The same mix of lengths, `factor` times as much."""
        parts = (round(value * factor) for value in (self.samples, self.tokens, self.supervised))
        return TokenCounts(**dict(zip(("samples", "tokens", "supervised"), parts, strict=True)))


def read_histogram(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, supervised, samples), int64 [n] each, of a CSV file with these three columns by name.

    Raises CacheError naming the line that is not three whole numbers with supervised <= tokens.
    """
    names = ("tokens", "supervised", "samples")
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if not set(names) <= set(reader.fieldnames or ()):
                raise CacheError(f"{path}: columns {reader.fieldnames}, wanted {', '.join(names)}")
            for line in reader:
                row = tuple(int(line[name] or "") for name in names)
                if not 0 <= row[1] <= row[0] or row[2] < 0:
                    raise CacheError(f"{path}: line {reader.line_num}: {row[1]} supervised of {row[0]} tokens")
                rows.append(row)
    except (OSError, ValueError, TypeError) as error:
        raise CacheError(f"{path}: cannot read the histogram: {error}") from error
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The price of one way to store the same text."""

    format: str
    codec: str
    last_codec: str
    last_hidden: str
    layers: int
    """Captured layers."""
    raw_bytes: int
    stored_bytes: int
    shards: int


def price_choices(
    spec: CacheSpec, counts: TokenCounts, layers: Iterable[int], ratios: Mapping[str, Ratios] | None = None
) -> list[Choice]:
    """Every format, codec, and place of the last hidden state, for each number of captured layers.

    `ratios` by codec replace the ones in MEASURED. The last hidden state is exact where the captured layers are or
    where its codec could not hold it, and shares their codec otherwise.
    """
    known = {**MEASURED, **(ratios or {})}
    share = counts.supervised / counts.tokens if counts.tokens else 0.0
    found = []
    for form, tag, where, number in itertools.product(FORMATS, CODECS, LAST_HIDDEN, layers):
        for last in dict.fromkeys((tag if tag in EXACT_CODECS else "bss1", tag if tag in LAST_CODECS else "bss1")):
            choice = replace(
                spec,
                format=form,
                codec=tag,
                last_codec=last,
                last_hidden=where,
                layer_ids=tuple(range(-1, number - 1)),  # a price depends on their number alone
                num_target_layers=max(spec.num_target_layers, number + 1),
            )
            both = Ratios(captured=known[tag].captured, last=known[last].last)
            size = estimate_bytes(choice, counts.tokens, share, samples=counts.samples, ratios=both)
            found.append(
                Choice(
                    format=form,
                    codec=tag,
                    last_codec=last,
                    last_hidden=where,
                    layers=number,
                    raw_bytes=size.raw_bytes,
                    stored_bytes=size.stored_bytes,
                    shards=size.shards,
                )
            )
    return found
