"""`cache_store diff`: what differs between two caches."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from cache_store.commands.progress import count_bar
from cache_store.commands.terminal import EXIT_FAILED, EXIT_OK, open_cache, wide_console
from cache_store.diff import CacheDiff, diff_caches
from cache_store.reader import CacheReader
from cache_store.storage import open_storage

HELP = "what differs between two caches: settings, ids, tokens, masks, content"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("other", metavar="OTHER", help="the second cache, on the same endpoint if both are in buckets")
    parser.add_argument(
        "--values", action="store_true", help="read and decode every common sample, however it is stored"
    )


def run(options: argparse.Namespace) -> int:
    """Print the differences; returns the exit code: 0 the same, 1 different."""
    a = open_cache(options)
    b = CacheReader(open_storage(options.other, endpoint_url=options.endpoint_url), allow_unsealed=True)
    with count_bar("comparing") as progress:
        found = diff_caches(a, b, values=options.values, progress=progress)
    if options.json:
        print(json.dumps({**asdict(found), "same": found.same}, ensure_ascii=False))
    else:
        _show(found, options)
    return EXIT_OK if found.same else EXIT_FAILED


def _show(found: CacheDiff, options: argparse.Namespace) -> None:
    console = wide_console()
    if found.settings:
        table = Table("setting", options.url, options.other, title="Settings", title_justify="left")
        for name, *values in found.settings:
            table.add_row(name, *(Text(json.dumps(value, ensure_ascii=False), overflow="fold") for value in values))
        console.print(table)
    rows: tuple[tuple[str, tuple[Any, ...]], ...] = (
        (f"only in {options.url}", found.only_a),
        (f"only in {options.other}", found.only_b),
        ("other length", tuple(f"{name} ({x} and {y} tokens)" for name, x, y in found.tokens)),
        ("other loss mask", found.masks),
        (f"other content ({found.compared})", found.content),
    )
    samples = Table("samples", "count", "for instance", title="Samples", title_justify="left")
    for what, names in rows:
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            samples.add_row(Text(what, overflow="fold"), f"{len(names):,}", Text(shown, overflow="fold"))
    if samples.row_count:
        console.print(samples)
    if found.compared == "nothing":
        print("content was not compared: the caches store samples in different ways; compare with --values")
    elif found.compared == "checksums":
        print("content was compared by the recorded checksums; --values reads the samples themselves")
    if found.compared != "nothing" and found.common and not (found.content or found.tokens or found.masks):
        print(f"the content of all {found.common:,} samples in both is the same")
    print(f"{'same' if found.same else 'DIFFERENT'}: {found.common:,} samples in both")
