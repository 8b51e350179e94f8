from __future__ import annotations

import errno
import pickle
from typing import Any

import pytest

from cache_store import retry
from cache_store.retry import (
    EndsEarly,
    GaveUp,
    ShortBody,
    StorageOptions,
    TooSlow,
    Transfer,
    is_transient,
    with_retries,
)

OPTIONS = StorageOptions(attempts=6, first_delay_s=1.0, longest_delay_s=4.0, floor_bytes_per_s=100, floor_window_s=10.0)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", found.append)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    return now


def failing(times: int, error: Exception) -> Any:
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return call


def test_waits_double_up_to_a_bound_and_differ(waits: list[float]) -> None:
    assert with_retries(failing(5, TimeoutError()), OPTIONS) == "done"
    longest = (1.0, 2.0, 4.0, 4.0, 4.0)
    assert all(0.5 * bound <= wait <= bound for wait, bound in zip(waits, longest, strict=True))
    assert len({wait / bound for wait, bound in zip(waits, longest, strict=True)}) > 1, "jitter"


def test_the_last_error_is_the_reason(waits: list[float]) -> None:
    with pytest.raises(GaveUp) as caught:
        with_retries(failing(6, ShortBody("cut")), OPTIONS)
    assert (caught.value.attempts, str(caught.value.reason)) == (6, "cut")
    assert len(waits) == 5


def test_an_inner_loop_that_gave_up_is_not_repeated(waits: list[float]) -> None:
    calls = []

    def outer() -> None:
        calls.append(1)
        with_retries(failing(99, TimeoutError()), OPTIONS)

    with pytest.raises(GaveUp):
        with_retries(outer, OPTIONS)
    assert len(calls) == 1


class FSTimeoutError(Exception):
    """As fsspec names it."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (BrokenPipeError(), True),
        (ShortBody(), True),
        (TooSlow(), True),
        (OSError(errno.EBUSY, "503"), True),
        (OSError(errno.EIO, "502"), True),
        (FSTimeoutError(), True),
        (EndsEarly(), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError(errno.EINVAL, "400"), False),
        (ValueError(), False),
    ],
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert is_transient(error) == passes


def test_floor_is_measured_per_window_and_per_connection(clock: list[float]) -> None:
    transfer = Transfer(10_000, OPTIONS)
    transfer.start()
    clock[0] = 9.0
    transfer.add(b"x")  # slow, but the window is not over
    clock[0] = 10.0
    transfer.add(b"x" * 1500)
    clock[0] = 19.0
    transfer.add(b"x")
    clock[0] = 21.0
    with pytest.raises(TooSlow, match=r"2 bytes in 11\.0 s, floor is 100 bytes/s"):
        transfer.add(b"x")
    assert (transfer.done, transfer.missing) == (1503, 8497), "what has arrived is kept"
    clock[0] = 100.0
    transfer.start()  # the next connection begins with a clean slate
    clock[0] = 109.0
    transfer.add(b"y")
    assert transfer.content() == b"x" * 1503 + b"y"


def test_options_travel_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(OPTIONS)) == OPTIONS
    assert OPTIONS.deadline_s(1000) == 10.0 + 30.0 + 10.0
