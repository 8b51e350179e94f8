from __future__ import annotations

import io

import pytest
from rich.console import Console

from cache_store.audit import AuditProgress
from cache_store.commands import progress


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    found = io.StringIO()
    terminal = Console(file=found, force_terminal=True, width=160)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    return found


def test_the_bar_shows_done_total_rate_and_damage(screen: io.StringIO) -> None:
    with progress.audit_bar("verifying") as advance:
        advance(AuditProgress(3, 7, 30_000_000, 70_000_000, 1))
    for wanted in ("verifying", "3/7 shards", "30.0/70.0 MB", "1 damaged"):
        assert wanted in screen.getvalue()


def test_a_count_bar(screen: io.StringIO) -> None:
    with progress.count_bar("comparing") as advance:
        advance(4, 9)
    assert "4/9" in screen.getvalue()


def test_no_bar_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    found = io.StringIO()
    log = Console(file=found, force_terminal=False)
    monkeypatch.setattr(progress, "Console", lambda stderr: log)
    with progress.audit_bar("verifying") as advance, progress.count_bar("comparing") as count:
        advance(AuditProgress(1, 1, 1, 1, 0))
        count(1, 1)
    assert found.getvalue().strip() == ""
