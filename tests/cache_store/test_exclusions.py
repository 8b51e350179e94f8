from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError, CacheIncomplete
from cache_store.exclusions import Exclusion, load_exclusions, substitute, write_exclusions
from cache_store.mixture import SampleSet, Source, describe
from cache_store.reader import CacheReader
from cache_store.selection import Selection
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import make_spec
from tests.cache_store.survival import same_build

COUNT = 20


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    same_build(storage, make_spec(shard_bytes=6000), COUNT)
    return storage


def exclude(storage: Storage, *positions: int) -> str:
    reader = CacheReader(storage)
    return write_exclusions(storage, [Exclusion(reader.ids[p], reader.shard_of(p), "test") for p in positions])


def test_a_list_is_immutable_and_proves_itself(storage: Storage) -> None:
    name = exclude(storage, 3, 5)
    assert exclude(storage, 5, 3) == name, "the same samples make the same list"
    assert exclude(storage, 3) != name
    assert [item.sample_id for item in load_exclusions(storage, name)] == ["s0003", "s0005"]
    storage.put(name, storage.read(name).replace(b"s0003", b"s0004"))
    with pytest.raises(CacheError, match="its content has changed"):
        load_exclusions(storage, name)


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_substitutes_are_the_next_sound_ones(bad: list[bool], random: object) -> None:
    excluded = np.array(bad)
    positions = np.random.default_rng(len(bad)).permutation(len(bad))
    if excluded.all():
        with pytest.raises(CacheIncomplete, match=r"all \d+ selected samples are excluded"):
            substitute(positions, excluded)
        return
    found = substitute(positions, excluded)
    assert not excluded[found].any()
    for place, position in enumerate(positions):
        following = [positions[(place + step) % len(positions)] for step in range(len(positions))]
        assert found[place] == next(p for p in following if not excluded[p])
        assert excluded[position] or found[place] == position


def test_order_and_state_of_a_run_stay_valid_on_every_rank(storage: Storage) -> None:
    selection = Selection(held_out_fraction=0.2)
    before = SampleSet([Source(storage=storage, selection=selection)])
    rows = [before.find(0, position)[1] for position in range(len(before))]
    lost = (rows[2], rows[3])
    sources = [Source(storage=storage, selection=selection, exclusions=exclude(storage, *lost))]
    ranks = [SampleSet(sources) for _ in range(3)]
    for after in ranks:
        assert len(after) == len(before)
        assert after.identity() == before.identity(), "a run may go on"
        found = [after.find(0, position)[1] for position in range(len(after))]
        assert found == [rows[4] if row in lost else row for row in rows], "substitutes come from the same selection"
        for row in found:
            after.readers[0].read(row)
    (report,) = ranks[0].reports
    assert report.substituted == 2
    assert "2 damaged and replaced by others" in describe(report)
