from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.shard import indexed_metadata, needed_positions, supervised_spans


@given(st.lists(st.booleans(), max_size=30))
def test_spans_and_needed_positions(values: list[bool]) -> None:
    mask = np.array(values, dtype=bool)
    spans = supervised_spans(mask)
    assert [i for start, end in spans for i in range(start, end)] == np.flatnonzero(mask).tolist()
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), "runs are as long as possible"
    assert needed_positions(mask).tolist() == [i for i in range(len(values) - 1) if values[i + 1]]


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({}, (None, None)),
        ({"finish_reasons": ["length", "stop"], "domain": "math"}, ("stop", "math")),
        ({"finish_reasons": [], "domain": 3}, (None, None)),
        ({"finish_reasons": "stop", "domain": ""}, (None, "")),
    ],
)
def test_the_index_repeats_only_text(metadata: dict[str, object], wanted: tuple[str | None, str | None]) -> None:
    assert indexed_metadata(metadata) == wanted
