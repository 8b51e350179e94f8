from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache_store import codec, row_codec
from cache_store.errors import CacheError
from tests.cache_store.samples import make_states

CODECS = ("i8cr", "f8r")
FINITE = np.array([bits for bits in range(1 << 16) if bits & 0x7F80 != 0x7F80], np.uint16)


def rms_for(name: str, channels: int, value: float = 1.0) -> np.ndarray | None:
    return np.full((2, channels), value, np.float32) if name == "i8cr" else None


def round_trip(name: str, bits: np.ndarray, rms: np.ndarray | None) -> tuple[np.ndarray, row_codec.RowErrors]:
    codes, stored, errors = row_codec.encode(name, bits, rms)
    out = np.empty_like(bits)
    row_codec.decode_into(name, (codes, stored), bits.shape[1], rms, out)
    return out, errors


def relative(out: np.ndarray, bits: np.ndarray) -> np.ndarray:
    found, wanted = (codec.to_float(values).astype(np.float64) for values in (out, bits))
    size = np.sqrt((wanted**2).sum(axis=-1))
    return np.sqrt(((found - wanted) ** 2).sum(axis=-1)) / np.where(size == 0, 1.0, size)


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_row_of_any_finite_values_passes_the_bound(name: str, data: Any) -> None:
    # Any bf16 bit patterns: zeros of both signs, subnormals, 1e38 beside 1e-38; any scales.
    shape = (2, data.draw(st.integers(0, 4)), data.draw(st.integers(1, 9)))
    bits = FINITE[data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, len(FINITE) - 1)))]
    scale = data.draw(st.sampled_from([1e-30, 0.02, 1.0, 3000.0]))
    out, errors = round_trip(name, bits, rms_for(name, shape[2], scale))
    found = relative(out, bits)
    assert codec.count_nonfinite(out) == 0
    assert found.max(initial=0.0) <= row_codec.MAX_ROW_ERROR[name] * (1 + 1e-6)
    assert np.allclose(errors.relative, found, rtol=1e-4, atol=1e-12), "what is recorded is what a reader gets"


@pytest.mark.parametrize("name", CODECS)
def test_every_finite_pattern_survives_alone_in_its_row(name: str) -> None:
    bits = np.stack([FINITE, FINITE])[:, :, None]
    out, _ = round_trip(name, bits, rms_for(name, 1))
    assert relative(out, bits).max() <= row_codec.MAX_ROW_ERROR[name]


@pytest.mark.parametrize("name", CODECS)
def test_massive_activations_stay_intact_and_harm_no_other_channel(name: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((2, 40, 256)).astype(np.float32)
    values[:, 0, 77] = 23936.0  # one channel of the first token, a thousand times all others together
    values[1, 5, 3] = -9728.0
    bits = codec.to_bits(values)
    out, errors = round_trip(name, bits, rms_for(name, 256))
    assert codec.to_float(out)[:, 0, 77].tolist() == [23936.0, 23936.0]
    assert codec.to_float(out)[1, 5, 3] == -9728.0
    others = np.delete(codec.to_float(out)[0, 0] - codec.to_float(bits)[0, 0], 77)
    assert np.sqrt((others**2).mean()) < 2 * row_codec.MAX_ROW_ERROR[name], "not 10 % of values rounded to zero"
    assert errors.outliers[0, 0] >= 1
    assert errors.outliers[0, 1:].mean() < 1


def test_int8_error_of_a_residual_stream_is_below_one_percent_at_one_byte_a_value() -> None:
    rng = np.random.default_rng(0)
    bits = make_states(rng, 2, 300, 512)
    rms = np.sqrt(np.square(codec.to_float(bits)).mean(axis=1))
    codes, stored, errors = row_codec.encode("i8cr", bits, rms)
    assert codes.size == bits.size
    assert stored.size < 0.06 * bits.size
    assert 0.001 < errors.relative.mean() < 0.01


def test_a_value_that_vanishes_beside_its_channels_scale_is_stored_exactly() -> None:
    bits, rms = codec.to_bits(np.array([[[1e-38, 0.0]]], np.float32)), np.full((1, 2), 1e9, np.float32)
    codes, stored, errors = row_codec.encode("i8cr", bits, rms)
    out = np.empty_like(bits)
    row_codec.decode_into("i8cr", (codes, stored), 1, rms, out)
    assert np.array_equal(out, bits)
    assert errors.outliers.tolist() == [[1]]


@pytest.mark.parametrize("name", CODECS)
def test_leading_rows_into_a_strided_batch_row(name: str) -> None:
    rng = np.random.default_rng(1)
    bits = make_states(rng, 2, 9, 6)
    bits[1, 3, 2] = codec.to_bits(np.array([30000.0], np.float32))[0]
    bits[1, 8, 2] = bits[1, 3, 2]  # an outlier of a row that is not wanted
    rms = rms_for(name, 6)
    codes, stored, _ = row_codec.encode(name, bits, rms)
    whole = np.empty_like(bits)
    row_codec.decode_into(name, (codes, stored), 9, rms, whole)
    row = np.full((5, 12), 7, np.uint16)  # as the loader lays it out: layers beside each other per token
    row_codec.decode_into(name, (codes, stored), 9, rms, row.reshape(5, 2, 6).transpose(1, 0, 2))
    assert np.array_equal(row, whole[:, :5].transpose(1, 0, 2).reshape(5, 12))


@given(hnp.arrays(np.float32, 40, elements=st.floats(-448, 448, width=32)))
def test_fp8_rounds_as_torch_does(values: np.ndarray) -> None:
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(row_codec._to_e4m3(values), wanted)


def test_every_fp8_code_means_what_torch_says() -> None:
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(row_codec._E4M3, wanted, equal_nan=True)


def damage(codes: np.ndarray, stored: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, str]]:
    far = stored.copy()
    far[24:26] = 255  # the first channel, after 6 scales and 6 counts
    more = stored.copy()
    more[12:14] = 9  # the first count
    return [
        (codes[:-1], stored, "codes, wanted"),
        (codes, stored[:-1], "bytes of scales"),
        (codes, stored[:10], "bytes of scales"),
        (codes, stored[:-2], "bytes of outliers"),
        (codes, more, "bytes of outliers"),
        (codes, far, "channel 65535 of 64"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_planes_that_do_not_fit_are_refused(case: int) -> None:
    bits = make_states(np.random.default_rng(2), 2, 3, 64)
    bits[1, 2, 1] = codec.to_bits(np.array([25000.0], np.float32))[0]
    codes, stored, _ = row_codec.encode("f8r", bits, None)
    bad_codes, bad_stored, message = damage(codes, stored)[case]
    with pytest.raises(CacheError, match=message):
        row_codec.decode_into("f8r", (bad_codes, bad_stored), 3, None, np.empty_like(bits))


def test_int8_needs_its_scales() -> None:
    with pytest.raises(CacheError, match="root mean square"):
        row_codec.encode("i8cr", make_states(np.random.default_rng(2), 1, 3, 8), None)
