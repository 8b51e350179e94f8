"""bf16 bits <-> stored byte planes, exactly, for every bit pattern (NaN payloads, -0 and subnormals included).

Codec `bss1` stores a field as two planes: the high byte of every value (sign and most of the exponent, which
compresses well; the container does it) and the low byte (almost random, stored as it is). Codec
`raw` has an empty high plane; its low plane holds the little-endian bf16 values themselves.
"""

from __future__ import annotations

import numpy as np

from cache_store.errors import CacheError

_EXPONENT = np.uint16(0x7F80)


def encode(codec: str, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stored planes (high, low) of a uint16 array, in C order, each uint8 [n]."""
    flat = np.ascontiguousarray(bits, dtype="<u2").reshape(-1)
    if codec == "raw":
        return np.empty(0, np.uint8), flat.view(np.uint8)
    if codec == "bss1":
        return (flat >> 8).astype(np.uint8), flat.astype(np.uint8)  # the cast keeps the low byte
    raise CacheError(f"codec {codec!r} is unknown to this program; it reads bss1 and raw")


def decode_into(codec: str, planes: tuple[np.ndarray, np.ndarray], out: np.ndarray) -> None:
    """Fill `out` (uint16, any strides) with the values of the planes (uint8), read in out's index order.

    Leading values only are needed when the planes are longer: slice the planes before. Raises CacheError when the
    number of bytes does not fit out's shape.
    """
    high, low = planes
    expected = {"raw": (0, 2 * out.size), "bss1": (out.size, out.size)}.get(codec)
    if expected is None:
        raise CacheError(f"codec {codec!r} is unknown to this program; it reads bss1 and raw")
    if (high.size, low.size) != expected:
        raise CacheError(f"planes of {high.size} and {low.size} bytes, wanted {expected} for shape {out.shape}")
    if codec == "raw":
        out[...] = low.view("<u2").reshape(out.shape)
        return
    out[...] = high.reshape(out.shape)  # widening first is faster than a shift that widens
    np.left_shift(out, 8, out=out)
    np.bitwise_or(out, low.reshape(out.shape), out=out)


def num_values(codec: str, planes: tuple[np.ndarray, np.ndarray]) -> int:
    """Number of bf16 values that the planes hold."""
    return planes[1].size // 2 if codec == "raw" else planes[1].size


def count_nonfinite(bits: np.ndarray) -> int:
    """How many of the bf16 values are infinite or NaN (exponent of all ones)."""
    return int(np.count_nonzero((bits & _EXPONENT) == _EXPONENT))


def to_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits, round to nearest even; NaN stays NaN (uint16, same shape)."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((words + (0x7FFF + ((words >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((words >> 16) | 0x40).astype(np.uint16), rounded)


def to_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits -> float32 of the same values (exact)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
