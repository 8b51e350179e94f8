"""The codec of one field (the captured layers, or the last hidden state) and the error that it was measured to make.

Every codec turns states [G, R, D] into two planes of bytes: the first one is compressed (zstd) by the container, the
second one is stored as it is (FORMAT.md, "Codecs").
Legend: G layers (1 for the last hidden state), R rows stored, T rows wanted, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cache_store import codec, row_codec
from cache_store.errors import CacheError
from cache_store.frame import Frame

EXACT_CODECS = ("bss1", "raw")
Planes = tuple[np.ndarray, np.ndarray]
"""(compressed by the container, stored as they are), uint8."""
StoredPlanes = tuple[Frame | np.ndarray, np.ndarray]
"""The same out of a shard; the first one may still be compressed."""


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """A codec by name, with the channels' root mean squares where it needs them."""

    name: str
    rms_GD: np.ndarray | None = None
    """float32 [G, D] for i8cr."""
    share_of_bound: float = 1.0
    """How much of the error that the codec may make its scales aim at (row_codec.encode); of no matter for decoding."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives every bit back."""
        return self.name in EXACT_CODECS

    def encode(self, bits_GRD: np.ndarray) -> tuple[Planes, row_codec.RowErrors | None]:
        """Planes of bf16 bits, and the errors measured on them (None: exact)."""
        if self.name not in row_codec.ROW_CODECS:
            return codec.encode(self.name, bits_GRD), None
        codes, stored, errors = row_codec.encode(self.name, bits_GRD, self.rms_GD, share_of_bound=self.share_of_bound)
        return (codes, stored), errors

    def decode_into(self, stored: StoredPlanes, rows: int, out_GTD: np.ndarray) -> None:
        """Fill `out_GTD` (uint16, any strides) with the first T of `rows` rows.

        Raises CacheError for wrong sizes and a damaged frame.
        """
        planes = (stored[0].open() if isinstance(stored[0], Frame) else stored[0], stored[1])
        if self.name in row_codec.ROW_CODECS:
            row_codec.decode_into(self.name, planes, rows, self.rms_GD, out_GTD)
            return
        groups, wanted, channels = out_GTD.shape
        values = groups * rows * channels
        if codec.num_values(self.name, planes) != values or (self.name == "bss1" and planes[0].size != values):
            found = f"planes of {planes[0].size} and {planes[1].size} bytes"
            raise CacheError(f"{found}, wanted {[groups, rows, channels]} values")
        cut = [plane.reshape(groups, rows, -1)[:, :wanted] if plane.size else plane for plane in planes]
        codec.decode_into(self.name, (cut[0], cut[1]), out_GTD)


@dataclass(frozen=True, slots=True)
class FieldCodecs:
    """The codecs of a cache's two fields of states."""

    captured: FieldCodec
    last: FieldCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """What a bounded-loss codec did to one tensor, measured on the decoded values."""

    tensor: str
    """Layer id, or `last`."""
    rows: int
    outliers: int
    """Values stored exactly."""
    mean: float
    """Mean over rows of |decoded - x| / |x|, Euclidean norms."""
    max: float
    """Largest of any row."""


def tensor_errors(names: Sequence[str], errors: row_codec.RowErrors) -> tuple[TensorError, ...]:
    """Per-layer totals of one sample."""
    return tuple(
        TensorError(
            tensor=name,
            rows=len(relative),
            outliers=int(outliers.sum(dtype=np.int64)),
            mean=float(relative.mean()) if len(relative) else 0.0,
            max=float(relative.max(initial=0.0)),
        )
        for name, relative, outliers in zip(names, errors.relative, errors.outliers, strict=True)
    )


def merge_errors(errors: Iterable[TensorError]) -> tuple[TensorError, ...]:
    """One entry per tensor, in order of first appearance."""
    found: dict[str, list[TensorError]] = {}
    for error in errors:
        found.setdefault(error.tensor, []).append(error)
    merged = []
    for name, parts in found.items():
        rows = sum(part.rows for part in parts)
        total = sum(part.mean * part.rows for part in parts)
        merged.append(
            TensorError(
                tensor=name,
                rows=rows,
                outliers=sum(part.outliers for part in parts),
                mean=total / rows if rows else 0.0,
                max=max(part.max for part in parts),
            )
        )
    return tuple(merged)
