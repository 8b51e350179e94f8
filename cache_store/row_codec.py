"""Bounded-loss codecs: one byte per value, one scale per row, and the few values that a scale cannot reach, exactly.

`i8cr` divides by a channel's calibrated root mean square and then by a scale per row into int8; `f8r` divides by a
scale per row into fp8 e4m3. A row is one token of one layer. Values out of reach of their row's scale (the massive
activations of a first token, and other outliers) are kept as bf16 in a list beside the codes, and a row whose error
would still exceed the codec's bound gets a finer scale until it does not: the bound holds for every row.
Legend: G layers, R rows (tokens), D channels, N outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.codec import to_bits, to_float
from cache_store.errors import CacheError

ROW_CODECS = ("i8cr", "f8r")
MAX_ROW_ERROR = {"i8cr": 0.01, "f8r": 0.04}
"""Largest relative error |decoded - x| / |x| of any row; a finer scale is taken where it would be exceeded."""

_BLOCK_VALUES = 1 << 17  # rows are coded in blocks whose temporaries stay in the processor's cache
_INT8_MAX = 127.0
_FP8_MAX = 448.0
_INT8_AIM = 0.0095
"""Row error that int8 scales aim at: a little below the bound, since bf16 rounds as well."""
_PER_ERROR = np.sqrt(12.0)  # int8 codes are uniform steps: error = step / sqrt(12)
_GAUSS = np.sqrt(np.pi / 2.0)  # standard deviation per mean of |x|
_WIDE = 12.0
_MEAN_PER_MEDIAN = 1.183  # of |x|, normal distribution
_FP8_REACH = 64.0  # times the mean of |x|: beyond it fp8's small values would lose their bits
_FINER = 0.7
_NO_SCALES = "codec i8cr needs the calibrated root mean square of every channel"
_LARGEST = 3.38e38  # a bit below the largest bf16
_SMALL, _LARGE = 1e-24, 1e32  # between them float32 sums of squares are sound


@dataclass(frozen=True, slots=True)
class RowErrors:
    """Measured on the decoded values, [G, R] each."""

    relative: np.ndarray
    """float32: |decoded - x| / |x| of a row, Euclidean norms."""
    outliers: np.ndarray
    """uint16: values of the row stored exactly."""


def encode(
    name: str, bits_GRD: np.ndarray, rms_GD: np.ndarray | None, *, share_of_bound: float = 1.0
) -> tuple[np.ndarray, np.ndarray, RowErrors]:
    """(codes uint8 [G*R*D], stored bytes uint8, errors) of finite bf16 bits.

    `share_of_bound` below 1 makes i8cr's rows that much finer than the codec's bound asks for.

    The stored bytes are, one after another and little-endian: scales bf16 [G, R], counts of outliers uint16 [G, R],
    and for all outliers in order their channels uint16 [N] and values bf16 [N].
    """
    groups, rows, channels = bits_GRD.shape
    codes = np.zeros((groups, rows, channels), np.uint8)
    scales = np.zeros((groups, rows), np.float32)
    outlying = np.zeros((groups, rows, channels), bool)
    relative = np.zeros((groups, rows), np.float32)
    step = max(1, _BLOCK_VALUES // max(channels, 1))
    for group in range(groups):
        rms = None if rms_GD is None else rms_GD[group]
        for start in range(0, rows, step):
            part = (group, slice(start, start + step))
            block = _Block(codes[part], scales[part], outlying[part], relative[part])
            with np.errstate(over="ignore", invalid="ignore"):  # near the end of float32: such rows get finer scales
                _encode_rows(name, (to_float(bits_GRD[part]), rms), share_of_bound * _INT8_AIM * _PER_ERROR, block)
    counts = outlying.sum(axis=-1, dtype="<u2")
    where = np.flatnonzero(outlying)
    stored = _join(scales, counts, where % channels, np.ascontiguousarray(bits_GRD).reshape(-1)[where])
    return codes.reshape(-1), stored, RowErrors(relative, counts)


def decode_into(
    name: str, planes: tuple[np.ndarray, np.ndarray], rows: int, rms_GD: np.ndarray | None, out_GTD: np.ndarray
) -> None:
    """Fill `out_GTD` (uint16 bf16 bits, any strides) with the first T of `rows` rows of every layer.

    Raises CacheError when the planes do not fit the shape.
    """
    groups, wanted, channels = out_GTD.shape
    codes, stored = planes
    if name == "i8cr" and rms_GD is None:
        raise CacheError(_NO_SCALES)
    if codes.size != groups * rows * channels:
        raise CacheError(f"{codes.size} codes, wanted {[groups, rows, channels]}")
    scales, counts, columns, values = _split(stored, groups, rows, channels)
    codes_GRD = codes.reshape(groups, rows, channels)
    step = max(1, _BLOCK_VALUES // max(channels, 1))
    for group in range(groups):
        rms = None if rms_GD is None else rms_GD[group]
        for start in range(0, wanted, step):
            part = (group, slice(start, min(start + step, wanted)))
            with np.errstate(over="ignore", invalid="ignore"):  # damaged scales; the reader counts what is not finite
                words = _dequantise(name, codes_GRD[part], scales[part], rms)
            out_GTD[part] = words.astype("<u4", copy=False).view("<u2")[:, 1::2]
    owners = np.repeat(np.arange(groups * rows), counts.reshape(-1))
    group_of, row_of = np.divmod(owners, max(rows, 1))
    kept = row_of < wanted
    out_GTD[group_of[kept], row_of[kept], columns[kept]] = values[kept]


def select_layers(
    planes: tuple[np.ndarray, np.ndarray], shape: tuple[int, int, int], chosen: Sequence[int]
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Planes of some of the layers as they are, and the outliers of each, int64; nothing is coded again.

    shape: (G, R, D) of the planes. Raises CacheError when they do not fit it.
    """
    groups, rows, channels = shape
    scales, counts, columns, values = _split(planes[1], groups, rows, channels)
    owners = np.repeat(np.arange(groups), counts.sum(axis=1, dtype=np.int64))
    picked = np.concatenate([np.flatnonzero(owners == group) for group in chosen])
    where = list(chosen)
    stored = _join(scales[where], counts[where], columns[picked], values[picked])
    codes = planes[0].reshape(groups, -1)[where].reshape(-1)
    return (codes, stored), counts[where].sum(axis=1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Block:
    """Views that receive the results of some rows."""

    codes: np.ndarray
    scales: np.ndarray
    outlying: np.ndarray
    relative: np.ndarray


def _encode_rows(name: str, given: tuple[np.ndarray, np.ndarray | None], step: float, block: _Block) -> None:
    values_RD, rms_D = given
    scaled = values_RD if rms_D is None else values_RD / rms_D
    scales = _as_bf16(_first_scales(name, (values_RD, scaled), rms_D, step))
    rows: slice | np.ndarray = slice(None)
    while True:
        tried = _try_rows(name, (values_RD[rows], scaled[rows]), scales[rows], rms_D)
        block.codes[rows], block.outlying[rows], block.relative[rows] = tried
        block.scales[rows] = scales[rows]
        bad = np.flatnonzero(~(block.relative <= MAX_ROW_ERROR[name]))
        if not len(bad):  # comes to pass: at scale 0 every value but 0 is an outlier
            return
        rows = bad
        scales[bad] = to_float(_bits_down(scales[bad] * np.float32(_FINER)))


def _first_scales(name: str, pair: tuple[np.ndarray, np.ndarray], rms_D: np.ndarray | None, step: float) -> np.ndarray:
    """float32 [R]: reaching the largest value, unless that makes steps coarser than `step` standard deviations."""
    values_RD, scaled_RD = pair
    magnitude = np.abs(scaled_RD)
    largest, mean = magnitude.max(axis=-1, initial=0.0), magnitude.mean(axis=-1)
    wide = largest > _WIDE * mean  # few rows; their mean is that of the outliers
    mean[wide] = _MEAN_PER_MEDIAN * np.median(magnitude[wide], axis=-1)
    if name == "f8r":
        return _finite(np.minimum(largest, _FP8_REACH * mean) / _FP8_MAX)
    reach = np.minimum(largest / _INT8_MAX, step * _GAUSS * mean)
    if rms_D is None:
        raise CacheError(_NO_SCALES)
    return _finite(np.minimum(reach, step * _norms(values_RD) / _norms(rms_D[None])))


def _try_rows(
    name: str, pair: tuple[np.ndarray, np.ndarray], scales_R: np.ndarray, rms_D: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes uint8 [R, D], which values are outliers [R, D], relative errors [R]) at these scales."""
    values_RD, scaled_RD = pair
    reach = _FP8_MAX if name == "f8r" else _INT8_MAX
    inverse = np.divide(np.float32(1), scales_R, out=np.zeros_like(scales_R), where=scales_R > 0)
    steps = scaled_RD * inverse[:, None]
    if name != "f8r":
        np.rint(steps, out=steps)
    outlying = np.abs(steps) > reach
    if not scales_R.all():
        outlying[scales_R == 0] = values_RD[scales_R == 0] != 0  # scaled ones may have vanished
    where = np.flatnonzero(outlying)  # of one axis: several times as fast as of two
    steps.reshape(-1)[where] = 0
    codes = _to_e4m3(steps) if name == "f8r" else steps.astype(np.int8).view(np.uint8)
    words = _dequantise(name, codes, scales_R, rms_D)
    words &= np.uint32(0xFFFF0000)
    missed = words.view(np.float32)
    missed -= values_RD
    missed.reshape(-1)[where] = 0
    error, size = _norms(missed), _norms(values_RD)
    return codes, outlying, np.divide(error, size, out=np.zeros_like(error), where=error != 0)


def _norms(values_RD: np.ndarray) -> np.ndarray:
    """Euclidean norm of every row, float64 [R]; squares in float32 where they fit."""
    squares = np.einsum("rd,rd->r", values_RD, values_RD)
    if not ((squares > _SMALL) & (squares < _LARGE)).all():
        squares = np.square(values_RD, dtype=np.float64).sum(axis=-1)
    return np.sqrt(squares.astype(np.float64))


def _dequantise(name: str, codes_RD: np.ndarray, scales_R: np.ndarray, rms_D: np.ndarray | None) -> np.ndarray:
    """code * scale (* root mean square) in float32, rounded to bf16, nearest even.

    uint32 [R, D]: the bf16 bits are the upper halves, the lower ones mean nothing.
    """
    values = _E4M3[codes_RD] if name == "f8r" else codes_RD.view(np.int8).astype(np.float32)
    values *= scales_R[:, None]
    if rms_D is not None:
        values *= rms_D
    words = values.view(np.uint32)  # finite, so the addition cannot carry a NaN into another value
    carry = words >> 16
    carry &= 1
    carry += 0x7FFF
    words += carry
    return words


def _join(scales: np.ndarray, counts: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The stored bytes, uint8."""
    parts = (to_bits(scales), counts, columns, values)
    return np.frombuffer(b"".join(part.astype("<u2").tobytes() for part in parts), np.uint8)


def _split(stored: np.ndarray, groups: int, rows: int, channels: int) -> tuple[np.ndarray, ...]:
    """(scales float32 [G, R], counts [G, R], channels [N], values [N]) of the stored bytes. Raises CacheError."""
    count = groups * rows
    words = stored.view("<u2") if stored.size % 2 == 0 else stored[:-1].view("<u2")
    if stored.size % 2 or words.size < 2 * count:
        raise CacheError(f"{stored.size} bytes of scales and outliers, wanted at least {4 * count}")
    scales, counts, rest = words[:count], words[count : 2 * count], words[2 * count :]
    total = int(counts.sum(dtype=np.int64))
    if rest.size != 2 * total:
        raise CacheError(f"{rest.size * 2} bytes of outliers, wanted {4 * total}")
    columns, values = rest[:total], rest[total:]
    if total and int(columns.max()) >= channels:
        raise CacheError(f"an outlier in channel {int(columns.max())} of {channels}")
    return to_float(scales).reshape(groups, rows), counts.reshape(groups, rows), columns, values


def _finite(scales: np.ndarray) -> np.ndarray:
    return np.minimum(scales, _LARGEST).astype(np.float32)


def _bits_down(scales: np.ndarray) -> np.ndarray:
    """bf16 bits of positive values, rounded towards zero: a finer scale must be smaller, down to 0."""
    return (scales.view(np.uint32) >> 16).astype(np.uint16)


def _as_bf16(scales: np.ndarray) -> np.ndarray:
    return to_float(to_bits(scales))


def _e4m3_values() -> np.ndarray:
    """float32 [256]: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, 0x7F and 0xFF are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3 = _e4m3_values()


def _to_e4m3(values: np.ndarray) -> np.ndarray:
    """e4m3 codes, uint8, of float32 values within +-448; round to nearest even."""
    words = values.view(np.uint32)
    signs = (words >> 24).astype(np.uint8)
    signs &= 0x80
    rounded = words & np.uint32(0x7FFFFFFF)
    rounded += ((rounded >> 20) & 1) + np.uint32(0x7FFFF)
    rounded >>= 20  # 8 bits of exponent, 3 of mantissa
    rounded -= 120 << 3  # bias 127 -> 7; wrong for subnormals, which come next
    codes = rounded.astype(np.uint8)
    small = np.flatnonzero(np.abs(values) < np.float32(2.0**-6))
    multiples = np.rint(np.abs(values.reshape(-1)[small]) * np.float32(512.0))  # of 2**-9, up to the first normal
    codes.reshape(-1)[small] = multiples.astype(np.uint8)
    codes |= signs
    return codes
