from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import numpy as np
import pytest

from cache_store import slots
from cache_store.slots import HEADER, SlotPool


def fill(pool: SlotPool, size: int, value: int) -> Any:
    lent = pool.take(size)
    assert lent is not None
    lent[1][:] = value
    return lent[0]


def test_a_slot_is_lent_again_once_nothing_refers_to_it() -> None:
    pool = SlotPool()
    first = fill(pool, 1000, 7)
    data = first.map()
    part = data[10:20]
    del data
    gc.collect()
    second = fill(pool, 1000, 8)
    assert second.path != first.path
    assert part.tolist() == [7] * 10, "a view keeps the whole slot"
    del part
    gc.collect()
    assert fill(pool, 1000, 9).path == first.path


def test_sizes_that_differ_much_do_not_share_a_slot() -> None:
    pool = SlotPool()
    large = fill(pool, 10_000, 1)
    large.map()  # given back at once
    assert fill(pool, 9000, 1) == large, "a little smaller fits"
    large.map()
    small = fill(pool, 100, 2)
    assert small.num_bytes == 100 + HEADER
    assert not os.path.exists(large.path) or small.path == large.path, "the unsuited one is gone"


def test_a_consumer_that_keeps_everything_gets_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SLOTS", 3)
    pool = SlotPool()
    kept = [fill(pool, 64, number).map() for number in range(3)]
    assert pool.take(64) is None
    assert [int(data[0]) for data in kept] == [0, 1, 2]
    del kept[1]
    gc.collect()
    assert pool.take(64) is not None


def _lend(pipe: Any) -> None:
    pool = SlotPool()
    for number in range(3):
        pipe.send(fill(pool, 4096, number))
        pipe.recv()


def test_between_processes() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_lend, args=(there,), daemon=True)
    process.start()
    paths = []
    for number in range(3):
        slot = here.recv()
        paths.append(slot.path)
        data = slot.map()
        assert np.all(data == number)
        del data
        gc.collect()
        here.send("next")
    assert len(set(paths)) == 1
    process.join(20)
    assert process.exitcode == 0
