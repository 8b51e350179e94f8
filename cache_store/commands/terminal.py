"""What the commands share: exit codes, how a cache is opened, sizes and tables for people."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_store.inspection import LengthBin
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage

EXIT_OK, EXIT_FAILED, EXIT_ORPHANS, EXIT_INCOMPLETE = 0, 1, 3, 4
EXIT_INTERRUPTED, EXIT_CLOSED = 130, 141
"""As the shell reports SIGINT and SIGPIPE."""
BAR_WIDTH = 40
_WIDTH_WITHOUT_TERMINAL = 160


def leave_pipe(code: int = EXIT_CLOSED) -> int:
    """Let what is still buffered go nowhere, or the interpreter fails on it once more at exit; returns the code."""
    with contextlib.suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return code


def at_least(lowest: int) -> Callable[[str], int]:
    """An option's type: a whole number that is not below `lowest`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"found {text!r}, wanted a whole number of at least {lowest}")
        return value

    return number


def fraction(text: str) -> float:
    """An option's type: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a number above 0 and at most 1")
    return value


def storage_of(options: argparse.Namespace) -> Storage:
    """The storage that the command's URL names."""
    return open_storage(options.url, endpoint_url=options.endpoint_url)


def open_cache(options: argparse.Namespace) -> CacheReader:
    """The command's cache, sealed or still being built."""
    return CacheReader(storage_of(options), allow_unsealed=True)


def wide_console(width: int = _WIDTH_WITHOUT_TERMINAL) -> Console:
    """Standard output; where its width is unknown (a file, a job's log), wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, width))


def pairs_table(title: str, values: dict[str, Any]) -> Table:
    """Names and values; what is not text is shown as JSON."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        table.add_row(name, Text(shown, overflow="fold"))
    return table


def show_histogram(console: Console, title: str, bins: Sequence[LengthBin]) -> None:
    """Bars of samples per range of lengths."""
    console.print(title)
    most = max((item.samples for item in bins), default=0)
    for item in bins:
        bar = "█" * round(BAR_WIDTH * item.samples / most) or ("▏" if item.samples else "")
        console.print(Text(f"{item.low:>7,}-{item.high:<7,} {bar} {item.samples:,}"))
