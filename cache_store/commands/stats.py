"""`cache_store stats`: lengths, supervised lengths, norms and outliers per layer, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_store.commands.progress import count_bar
from cache_store.commands.terminal import EXIT_OK, at_least, open_cache, show_histogram, wide_console
from cache_store.stats import MASSIVE, CacheStats, cache_stats
from cache_store.stats_plot import save_png

HELP = "histograms of lengths and supervised lengths, norms and outliers per layer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument(
        "--samples", type=at_least(0), default=64, help="samples whose states are read (default 64; 0: none)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="of their draw (default 0)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them into a picture as well (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Print the distributions; returns the exit code."""
    with count_bar("reading samples") as progress:
        stats = cache_stats(open_cache(options), read_samples=options.samples, seed=options.seed, progress=progress)
    if options.png:
        save_png(stats, options.png)
    if options.json:
        print(json.dumps(asdict(stats)))
        return EXIT_OK
    console = wide_console()
    _show(stats, console)
    if options.png:
        console.print(Text(f"picture: {options.png}"), soft_wrap=True)
    return EXIT_OK


def _show(stats: CacheStats, console: Console) -> None:
    title = f"{stats.url}: {stats.samples:,} samples, {stats.tokens:,} tokens, {stats.supervised_tokens:,} supervised"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(f"Domains: {', '.join(f'{name} {count:,}' for name, count in stats.domains.items()) or '-'}")
    show_histogram(console, "Tokens per sample", stats.lengths)
    show_histogram(console, "Supervised tokens per sample", stats.supervised_lengths)
    if not stats.layers:
        return
    heads = ("layer", "RMS", "norm: median", "99 %", "largest", "largest value", "after token 0", "massive", "channels")
    table = Table(*heads, title=f"States of {stats.read_samples} samples", title_justify="left")
    for layer in stats.layers:
        numbers = (layer.rms, layer.norm_median, layer.norm_p99, layer.norm_max, layer.max_abs)
        table.add_row(
            layer.layer,
            *(f"{number:.4g}" for number in numbers),
            f"{layer.max_abs_after_first:.4g}",
            f"{layer.massive:,} in {layer.massive_rows:,}" if layer.massive else "-",
            ", ".join(map(str, layer.massive_channels)) or "-",
        )
    console.print(table)
    console.print(f"massive: values beyond {MASSIVE:g} x the layer's median magnitude, in so many of its rows (tokens)")
