"""`cache_store gc`: what crashes left behind."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from cache_store.commands.terminal import EXIT_OK, EXIT_ORPHANS, storage_of, wide_console
from cache_store.estimate import size_text
from cache_store.gc import SAFE_AGE_S, Garbage, GcReport, collect_garbage

HELP = "find what crashes left behind, and delete it with --delete"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--delete", action="store_true", help="delete; without it nothing changes")
    parser.add_argument(
        "--older-than",
        type=seconds,
        default=SAFE_AGE_S,
        metavar="AGE",
        help="leave what is younger, since a running build may need it: 30m, 12h, 7d (default 24h)",
    )
    parser.add_argument("--aside", action="store_true", help="also what `repair` has moved aside")


def seconds(text: str) -> float:
    """An age like 30m, 12h or 7d; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; wanted 30m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def run(options: argparse.Namespace) -> int:
    """Print what was found; returns the exit code: 0 nothing to delete is left, 3 something is.

    Objects too young to tell do not count.
    """
    report = collect_garbage(
        storage_of(options), delete=options.delete, older_than_s=options.older_than, aside=options.aside
    )
    left = len(report.garbage) - report.deleted
    if options.json:
        print(json.dumps({**asdict(report), "left": left}))
    else:
        _show(report, options)
    return EXIT_ORPHANS if left else EXIT_OK


def _show(report: GcReport, options: argparse.Namespace) -> None:
    if report.garbage or report.young:
        table = Table("what", "object", "bytes", "age", "", title="Garbage", title_justify="left")
        done = "deleted" if options.delete else "would go"
        for item, fate in [*((i, done) for i in report.garbage), *((i, "kept: young") for i in report.young)]:
            table.add_row(item.kind, Text(item.name, overflow="fold"), f"{item.size:,}", _age(item), fate)
        wide_console().print(table)
    size = size_text(sum(item.size for item in report.garbage))
    if options.delete:
        freed = size_text(report.freed_bytes)
        print(f"deleted {report.deleted:,} objects, {freed}; kept {len(report.young):,} young ones")
    else:
        print(f"{len(report.garbage):,} objects, {size}, could go; {len(report.young):,} are too young to tell")
        if report.garbage:
            print(f"delete them: cache_store gc {' '.join(_same_choice(options))} --delete")


def _same_choice(options: argparse.Namespace) -> list[str]:
    """The arguments that find the same objects again."""
    words = [options.url]
    words += ["--older-than", f"{options.older_than:g}"] if options.older_than != SAFE_AGE_S else []
    words += ["--aside"] if options.aside else []
    words += ["--endpoint-url", options.endpoint_url] if options.endpoint_url else []
    return words


def _age(item: Garbage) -> str:
    if item.age_s is None:
        return "?"
    unit = next((unit for unit in ("d", "h", "m") if item.age_s >= _UNITS[unit]), "s")
    return f"{item.age_s / _UNITS[unit]:.0f}{unit}"
