from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.prefetch import PrefetchGate

DEADLINE_S = 20


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=12), limit=st.integers(1, 250), workers=st.integers(1, 3)
)
def test_ready_batches_stay_within_the_limit(sizes: list[int], limit: int, workers: int) -> None:
    """Workers as threads, each with its own view of the sizes, as each process has."""
    shared = PrefetchGate(limit)
    lock, ready, started = threading.Condition(), set(), []

    def work(worker: int) -> None:
        gate = view_of(shared)
        for number, size in enumerate(sizes):
            mine = number % workers == worker
            assert gate.admit(size, wait=mine)
            if mine:
                with lock:
                    ready.add(number)
                    started.append(number)
                    lock.notify_all()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for number in range(len(sizes)):
        shared.released()
        with lock:
            assert lock.wait_for(lambda number=number: number in ready, timeout=DEADLINE_S), "the next always comes"
            held = [n for n in started if n >= number]
            assert sum(sizes[n] for n in held) <= max(limit, sizes[number]), "the batch in use counts"
    for thread in threads:
        thread.join(DEADLINE_S)


def view_of(gate: PrefetchGate) -> PrefetchGate:
    """Another process's copy: shared counter, own list of sizes."""
    view = PrefetchGate(gate._limit)
    view._condition, view._done, view._closed = gate._condition, gate._done, gate._closed
    return view


@pytest.mark.parametrize("wait", [True, False])
def test_a_closed_gate_lets_nobody_wait(wait: bool) -> None:
    gate = PrefetchGate(1)
    gate.close()
    assert gate.admit(10, wait=wait) is not wait


def _wait_for_ever(gate: PrefetchGate, pipe: Any) -> None:
    gate.admit(5, wait=True)
    pipe.send("first")
    pipe.send(gate.admit(5, wait=True))


def test_a_worker_is_released_when_the_consumer_stops() -> None:
    gate = PrefetchGate(1)
    gate.released()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_wait_for_ever, args=(gate, there), daemon=True)
    process.start()
    assert here.poll(DEADLINE_S)
    assert here.recv() == "first"
    time.sleep(0.05)
    assert not here.poll(), "the second batch is over the limit while the first is in use"
    gate.close()
    assert here.poll(DEADLINE_S)
    assert here.recv() is False
    process.join(DEADLINE_S)
