"""Tiny targets only: one thread is faster than two."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _always_one_thread(one_thread: None) -> None:
    """Every module here."""
