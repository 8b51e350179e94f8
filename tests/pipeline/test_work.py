from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import StorageError
from pipeline.errors import ConfigError
from pipeline.work import one_line, own_error, split


@given(st.lists(st.integers(), max_size=50), st.integers(1, 20))
def test_split_keeps_order_and_size(items: list[int], size: int) -> None:
    pieces = split(items, size)
    assert [item for piece in pieces for item in piece] == items
    assert all(len(piece) == size for piece in pieces[:-1])


def test_own_error_is_found_through_wrappers() -> None:
    full = StorageError("disk: no space left")
    wrapped = RuntimeError("task failed")
    wrapped.cause = full  # type: ignore[attr-defined]  what Ray's task errors do
    with pytest.raises(ValueError, match="outer") as caught:
        raise ValueError("outer") from wrapped
    assert own_error(caught.value) is full
    assert own_error(RuntimeError("actor died")) is None


def test_own_error_is_not_rays_wrapper_of_it() -> None:
    class Wrapper(ConfigError):
        """As Ray makes them: an instance of the class that it wraps, with the remote traceback as its text."""

    wrapper, own = Wrapper("Traceback ..."), ConfigError("no such directory")
    wrapper.cause = own  # type: ignore[attr-defined]
    assert own_error(wrapper) is own


def test_one_line_is_the_end_of_a_remote_traceback() -> None:
    assert one_line(RuntimeError("Traceback\n  File x\nValueError: no such layer\n")) == "ValueError: no such layer"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
