"""A bar for long commands: done/total, rate, time left, failures; on stderr, and only where a person looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cache_store.audit import AuditProgress


@contextmanager
def audit_bar(text: str) -> Iterator[Callable[[AuditProgress], None]]:
    """A bar that `verify_cache` can feed; silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[shards]} shards"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[damaged]} damaged"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None, shards="0/?", damaged=0)

        def advance(found: AuditProgress) -> None:
            bar.update(
                task,
                completed=found.bytes_done,
                total=found.num_bytes,
                shards=f"{found.shards_done:,}/{found.shards:,}",
                damaged=found.damaged_shards,
            )

        yield advance


@contextmanager
def count_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for (done, total); silent where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
