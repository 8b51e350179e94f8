from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError
from cache_store.selection import Selection, select, unit_hash

DOMAINS = ("math", "code", None)
PINNED = (0.6361797747960533, 0.4991777991724482)


def table(ids: list[str]) -> pa.Table:
    """The columns of an index that a selection reads."""
    return pa.table(
        {
            "sample_id": pa.array(ids, pa.large_string()),
            "tokens": pa.array([10 + number % 40 for number in range(len(ids))], pa.int32()),
            "domain": pa.array([DOMAINS[number % 3] for number in range(len(ids))], pa.large_string()),
        }
    )


def chosen(ids: list[str], **conditions: Any) -> set[str]:
    return {ids[position] for position in select(table(ids), Selection(**conditions)).positions}


IDS = [f"row-{number}" for number in range(2000)]


def test_everything_by_default() -> None:
    found = select(table(IDS), Selection())
    assert found.positions.tolist() == list(range(2000))
    assert found.dropped == {}


@given(fraction=st.floats(0, 0.99), ids=st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=30))
def test_a_split_is_a_partition(fraction: float, ids: list[str]) -> None:
    train = chosen(ids, split="train", held_out_fraction=fraction)
    held_out = chosen(ids, split="held_out", held_out_fraction=fraction)
    assert train | held_out == set(ids)
    assert not train & held_out


def test_shares_are_as_asked() -> None:
    assert 0.08 < len(chosen(IDS, split="held_out", held_out_fraction=0.1)) / 2000 < 0.12
    assert 0.27 < len(chosen(IDS, sample_fraction=0.3)) / 2000 < 0.33
    both = chosen(IDS, split="held_out", held_out_fraction=0.5, sample_fraction=0.5)
    assert 0.21 < len(both) / 2000 < 0.29, "split and fraction are independent"


@given(small=st.floats(0.01, 1), large=st.floats(0.01, 1), order=st.permutations(range(20)))
def test_sides_depend_on_the_id_alone(small: float, large: float, order: list[int]) -> None:
    small, large = min(small, large), max(small, large)
    assert chosen(IDS[:50], sample_fraction=small) <= chosen(IDS[:50], sample_fraction=large)
    shuffled = [IDS[number] for number in order]
    more = chosen(IDS, split="held_out", held_out_fraction=min(large, 0.9))
    assert chosen(shuffled, split="held_out", held_out_fraction=min(large, 0.9)) == more & set(shuffled)


def test_the_hash_is_the_same_everywhere() -> None:
    # Pinned: a changed hash would train on what an earlier run held out.
    assert unit_hash("row-0", "split") == pytest.approx(PINNED[0], abs=1e-15)
    assert unit_hash("row-0", "fraction") == pytest.approx(PINNED[1], abs=1e-15)


def test_rows_of_one_conversation_stay_together() -> None:
    ids = [f"c{number}#turn{turn}" for number in range(200) for turn in range(3)]
    held_out = {sample_id.split("#")[0] for sample_id in chosen(ids, split="held_out", held_out_fraction=0.3)}
    train = {sample_id.split("#")[0] for sample_id in chosen(ids, split="train", held_out_fraction=0.3)}
    assert held_out
    assert not held_out & train
    assert unit_hash("gsm8k#1", "split") != unit_hash("gsm8k#2", "split"), "only the suffix #turn<k> is dropped"


def test_each_dropped_sample_is_counted_once() -> None:
    conditions = {"split": "train", "held_out_fraction": 0.2, "sample_fraction": 0.7}
    found = select(table(IDS), Selection(**conditions, max_tokens=30, domains=("math", "code")))
    assert len(found.positions) + sum(found.dropped.values()) == 2000
    assert set(found.dropped) == {
        "in the held_out split",
        "outside the sample fraction",
        "of other domains",
        "longer than 30 tokens",
    }
    index = table(IDS)
    assert max(index["tokens"].to_numpy()[found.positions]) == 30
    assert set(np.array(index["domain"].to_pylist())[found.positions]) == {"math", "code"}


def test_unknown_domain_is_named() -> None:
    with pytest.raises(CacheError, match="no sample has the domain maths; the cache holds None, code, math"):
        select(table(IDS), Selection(domains=("math", "maths")))


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0"),
        ({"sample_fraction": 0.0}, "sample_fraction is 0.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_impossible_conditions_are_refused(conditions: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        Selection(**conditions)
