from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError
from cache_store.order import epoch_order, rank_slice, step_samples

SIZES = st.integers(1, 60)
PINNED = [[7, 1, 6, 4, 3, 5, 0, 2], [4, 5, 3, 0, 2, 7, 1, 6]]


@given(seed=st.integers(-5, 2**70), epoch=st.integers(0, 1000), n=SIZES)
def test_epoch_order_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    assert sorted(epoch_order(seed, epoch, n)) == list(range(n))


def test_epoch_order_is_the_same_everywhere() -> None:
    # Pinned: a changed order would make resumed runs see other samples.
    assert epoch_order(42, 0, 8).tolist() == PINNED[0]
    assert epoch_order(42, 1, 8).tolist() == PINNED[1]


def test_orders_of_epochs_and_seeds_are_unrelated() -> None:
    n = 5000
    inverse = [np.argsort(epoch_order(1, epoch, n)) for epoch in range(5)] + [np.argsort(epoch_order(2, 0, n))]
    for a in range(len(inverse)):
        for b in range(a):
            # Unrelated permutations move a sample by n/3 on average.
            assert abs(np.abs(inverse[a] - inverse[b]).mean() / n - 1 / 3) < 0.02


@given(seed=st.integers(0, 9), n=SIZES, batch=SIZES, steps=st.integers(1, 8))
def test_steps_walk_through_the_epochs_without_loss(seed: int, n: int, batch: int, steps: int) -> None:
    pairs = [step_samples(seed, n, batch, step) for step in range(steps)]
    epochs = np.concatenate([epochs for epochs, _ in pairs])
    positions = np.concatenate([positions for _, positions in pairs])
    assert np.array_equal(epochs, np.arange(steps * batch) // n)
    for epoch in range(steps * batch // n):  # each whole epoch holds each sample once, the carried tail included
        assert np.array_equal(positions[epochs == epoch], epoch_order(seed, epoch, n))


@given(batch=SIZES, world=st.integers(1, 9))
def test_ranks_share_a_batch(batch: int, world: int) -> None:
    parts = [rank_slice(batch, rank, world) for rank in range(world)]
    assert [place for part in parts for place in part] == list(range(batch))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_every_rank_sees_new_samples_each_epoch() -> None:
    n, world = 400, 4
    for rank in range(world):
        share = rank_slice(n, rank, world)
        seen = [set(step_samples(7, n, n, epoch)[1][share.start : share.stop]) for epoch in range(3)]
        assert len(seen[0] & seen[1]) < 0.5 * n / world
        assert len(seen[0] & seen[2]) < 0.5 * n / world


@pytest.mark.parametrize(("n", "batch", "step"), [(0, 4, 0), (5, 0, 0), (5, 4, -1)])
def test_impossible_steps_are_refused(n: int, batch: int, step: int) -> None:
    with pytest.raises(CacheError, match="can be drawn"):
        step_samples(0, n, batch, step)


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(CacheError, match="rank 2 is not one of 2"):
        rank_slice(8, 2, 2)
