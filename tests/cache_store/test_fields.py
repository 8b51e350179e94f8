from __future__ import annotations

import numpy as np
import pytest

from cache_store.errors import CacheError
from cache_store.fields import FieldCodec, TensorError, merge_errors, tensor_errors
from cache_store.row_codec import RowErrors
from tests.cache_store.samples import make_states

ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16).reshape(4, 128, 128)


@pytest.mark.parametrize("name", ["bss1", "raw"])
def test_exact_codecs_give_every_pattern_back_and_measure_nothing(name: str) -> None:
    field = FieldCodec(name)
    planes, errors = field.encode(ALL_PATTERNS)
    out = np.empty_like(ALL_PATTERNS)
    field.decode_into(planes, 128, out)
    assert np.array_equal(out, ALL_PATTERNS)
    assert errors is None
    assert field.exact


@pytest.mark.parametrize("name", ["bss1", "raw", "i8cr", "f8r"])
def test_leading_rows_are_those_of_the_whole(name: str) -> None:
    bits = make_states(np.random.default_rng(0), 3, 11, 8)
    field = FieldCodec(name, np.ones((3, 8), np.float32) if name == "i8cr" else None)
    planes, _ = field.encode(bits)
    whole, part = np.empty_like(bits), np.empty((3, 4, 8), np.uint16)
    field.decode_into(planes, 11, whole)
    field.decode_into(planes, 11, part)
    assert np.array_equal(part, whole[:, :4])
    assert field.exact == (name in ("bss1", "raw"))


@pytest.mark.parametrize("name", ["bss1", "raw", "i8cr", "f8r"])
def test_planes_of_another_shape_are_refused(name: str) -> None:
    field = FieldCodec(name, np.ones((1, 8), np.float32) if name == "i8cr" else None)
    planes, _ = field.encode(make_states(np.random.default_rng(0), 1, 4, 8))
    with pytest.raises(CacheError, match="wanted"):
        field.decode_into(planes, 5, np.empty((1, 5, 8), np.uint16))


def test_errors_are_summed_up_by_tensor() -> None:
    errors = RowErrors(np.array([[0.1, 0.3], [0.0, 0.2]], np.float32), np.array([[1, 0], [0, 4]], np.uint16))
    one = tensor_errors(["3", "7"], errors)
    assert [(e.tensor, e.rows, e.outliers) for e in one] == [("3", 2, 1), ("7", 2, 4)]
    assert one[0].mean == pytest.approx(0.2)
    assert one[0].max == pytest.approx(0.3)
    other = (TensorError(tensor="3", rows=6, outliers=5, mean=0.4, max=0.5),)
    merged = merge_errors([*one, *other])
    assert [(e.tensor, e.rows, e.outliers) for e in merged] == [("3", 8, 6), ("7", 2, 4)]
    assert merged[0].mean == pytest.approx((2 * 0.2 + 6 * 0.4) / 8)
    assert merged[0].max == 0.5
    assert merge_errors([]) == ()
    empty = tensor_errors(["3"], RowErrors(np.zeros((1, 0), np.float32), np.zeros((1, 0), np.uint16)))
    assert merge_errors(empty)[0].mean == 0.0
