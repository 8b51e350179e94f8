"""`cache_store head`: the first samples of the index as a table; no shard is read."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table
from rich.text import Text

from cache_store import index
from cache_store.commands.terminal import EXIT_OK, at_least, open_cache, wide_console
from cache_store.estimate import size_text
from cache_store.reader import CacheReader

HELP = "the first samples as a table: ids, lengths, domains, where they lie"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--n", type=at_least(0), default=10, help="how many (default 10)")
    parser.add_argument("--start", type=at_least(0), default=0, help="first position (default 0)")


def run(options: argparse.Namespace) -> int:
    """Print the samples; returns the exit code."""
    reader = open_cache(options)
    start, end = options.start, min(options.start + options.n, len(reader))
    rows = [_row(reader, position) for position in range(start, end)]
    if options.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        return EXIT_OK
    table = Table("", "sample", "domain", "finish", "tokens", "supervised", "bytes", "shard @ offset")
    for row in rows:
        texts: list[Text | str] = [_folded(row[name]) for name in ("sample_id", "domain", "finish")]
        texts += [f"{row['tokens']:,}", f"{row['supervised']:,} in {len(row['spans'])}", size_text(row["length"])]
        table.add_row(str(row["position"]), *texts, _folded(f"{row['shard']} @ {row['offset']:,}"))
    console = wide_console()
    console.print(table)
    console.print(f"{len(rows)} of {len(reader):,} samples")
    return EXIT_OK


def _folded(value: str | None) -> Text:
    return Text(value or "-", overflow="fold")


def _row(reader: CacheReader, position: int) -> dict[str, Any]:
    values = {name: reader.index[name][position].as_py() for name in ("sample_id", "domain", "finish", "tokens")}
    places = {name: reader.index[name][position].as_py() for name in ("supervised", "offset", "length")}
    spans = index.spans_at(reader.index, position).tolist()
    return {"position": position, **values, **places, "spans": spans, "shard": reader.shard_of(position)}
