from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache_store import codec
from cache_store.errors import CacheError

CODECS = ("bss1", "raw")
ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("tag", CODECS)
def test_every_bit_pattern_survives(tag: str) -> None:
    # All 65,536 values: both zeros, subnormals, infinities and every NaN payload.
    planes = codec.encode(tag, ALL_PATTERNS)
    out = np.empty_like(ALL_PATTERNS)
    codec.decode_into(tag, planes, out)
    assert np.array_equal(out, ALL_PATTERNS)
    assert codec.num_values(tag, planes) == 1 << 16


@given(
    bits=hnp.arrays(np.uint16, hnp.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5)),
    tag=st.sampled_from(CODECS),
)
def test_round_trip_into_a_strided_batch_row(bits: np.ndarray, tag: str) -> None:
    layers, tokens, size = bits.shape
    row = np.zeros((tokens, layers * size), np.uint16)  # as the loader lays it out: layers beside each other per token
    layered = row.reshape(tokens, layers, size).transpose(1, 0, 2)
    codec.decode_into(tag, codec.encode(tag, bits), layered)
    assert np.array_equal(row, bits.transpose(1, 0, 2).reshape(tokens, layers * size))


def test_bss1_separates_the_bytes() -> None:
    high, low = codec.encode("bss1", np.array([0x1234, 0xABCD], np.uint16))
    assert high.tolist() == [0x12, 0xAB]
    assert low.tolist() == [0x34, 0xCD]


@pytest.mark.parametrize("tag", CODECS)
def test_wrong_number_of_bytes_is_an_error(tag: str) -> None:
    planes = codec.encode(tag, np.zeros(6, np.uint16))
    with pytest.raises(CacheError, match=r"wanted .* for shape \(7,\)"):
        codec.decode_into(tag, planes, np.empty(7, np.uint16))


def test_unknown_codec_is_named() -> None:
    with pytest.raises(CacheError, match="'lz4'"):
        codec.encode("lz4", np.zeros(1, np.uint16))
    with pytest.raises(CacheError, match="'lz4'"):
        codec.decode_into("lz4", codec.encode("raw", np.zeros(1, np.uint16)), np.empty(1, np.uint16))


def test_nonfinite_values_are_counted() -> None:
    wanted = int((~torch.isfinite(torch.from_numpy(ALL_PATTERNS).view(torch.bfloat16))).sum())
    assert codec.count_nonfinite(ALL_PATTERNS) == wanted


def test_float_conversion_agrees_with_torch() -> None:
    values = torch.from_numpy(ALL_PATTERNS).view(torch.bfloat16).float().numpy()
    assert np.array_equal(codec.to_float(ALL_PATTERNS), values, equal_nan=True)


@given(hnp.arrays(np.float32, 20, elements=st.floats(width=32)))
def test_rounding_agrees_with_torch(values: np.ndarray) -> None:
    wanted = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(codec.to_float(codec.to_bits(values)), wanted, equal_nan=True)
