"""Tiny tensors only: a second thread would wait for the first, and for everything else that runs on this machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _always_one_thread(one_thread: None) -> None:
    """Every module here."""
