from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError
from cache_store.order import step_samples
from cache_store.packing import StreamConfig, pack, share_of_step

LENGTHS = st.lists(st.integers(1, 40), max_size=40)
TOKENS = np.random.default_rng(3).integers(2, 33, size=57)


def config(**changes: Any) -> StreamConfig:
    settings = {"seed": 1, "global_batch_size": 9, "micro_batch_size": 2, "max_length": 32, "num_steps": 8}
    return StreamConfig(**{**settings, **changes})


def share(step: int, **changes: Any) -> Any:
    return share_of_step(config(**changes), len(TOKENS), lambda epochs, positions: TOKENS[positions], step)


@given(lengths=LENGTHS, slack=st.integers(0, 60))
def test_every_document_stands_in_one_row_within_the_budget(lengths: list[int], slack: int) -> None:
    budget = max(lengths, default=1) + slack
    rows = pack(lengths, budget)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[document] for document in row) <= budget for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # No two rows would fit into one: best fit never opens a row that it does not need.
    loads = sorted(sum(lengths[document] for document in row) for row in rows)
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def test_packing_is_tight() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, size=512)
    rows = pack(lengths.tolist(), 1024)
    assert lengths.sum() / (len(rows) * 1024) > 0.98


def test_a_document_over_the_budget_is_refused() -> None:
    with pytest.raises(CacheError, match="a document of 9 tokens does not fit a row of 8"):
        pack([3, 9], 8)


@given(
    step=st.integers(0, 20),
    size=st.integers(1, 24),
    world=st.integers(1, 7),
    micro=st.integers(1, 4),
    budget=st.none() | st.integers(32, 200),
)
def test_ranks_share_the_rows_of_a_step(step: int, size: int, world: int, micro: int, budget: int | None) -> None:
    settings = {"global_batch_size": size, "micro_batch_size": micro, "pack_tokens": budget}
    whole = share(step, **settings)
    ranks = [share(step, **settings, rank=rank, world_size=world) for rank in range(world)]
    assert [row for rank in ranks for row in rank.rows] == whole.rows, "rows do not depend on the ranks"
    assert sorted(whole.places) == list(range(size))
    epochs, positions = step_samples(1, len(TOKENS), size, step)
    assert np.array_equal(whole.epochs, epochs)
    assert np.array_equal(whole.positions, positions)
    assert {rank.micro_batches for rank in ranks} == {-(-max(len(rank.rows) for rank in ranks) // micro)}
    sizes = {len(rank.rows) for rank in ranks}
    assert max(sizes) - min(sizes) <= 1
    if budget is None:
        assert whole.rows == [[place] for place in range(size)]
    else:
        assert all(whole.lengths[row].sum() <= budget for row in whole.rows)


def test_lengths_are_cut() -> None:
    assert share(0, max_length=8).lengths.max() == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"start_step": -1}, "start_step is -1"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        ({"pack_tokens": 31}, "pack_tokens is 31, wanted at least max_length 32"),
    ],
)
def test_impossible_streams_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        config(**changes)
