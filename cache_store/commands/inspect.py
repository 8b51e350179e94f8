"""`cache_store inspect`: identity, totals, rejects, lengths and facts per layer."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_store.commands.terminal import EXIT_OK, open_cache, pairs_table, show_histogram, wide_console
from cache_store.estimate import size_text
from cache_store.fields import TensorError
from cache_store.inspection import Inspection, inspect_cache

HELP = "identity, totals, shards, rejects, lengths and facts per layer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--no-probe", action="store_true", help="do not read states for the facts per layer")


def run(options: argparse.Namespace) -> int:
    """Print the facts; returns the exit code."""
    facts = inspect_cache(open_cache(options), probe=not options.no_probe)
    if options.json:
        print(json.dumps(asdict(facts)))
    else:
        _show(facts, wide_console())
    return EXIT_OK


def errors_table(errors: tuple[TensorError, ...]) -> Table:
    """What bounded-loss codecs lost, tensor by tensor."""
    title = "Error of a row by the codecs, |decoded - x| / |x|"
    table = Table("tensor", "mean", "largest", "values kept exactly", title=title, title_justify="left")
    for error in errors:
        table.add_row(error.tensor, f"{error.mean:.3%}", f"{error.max:.3%}", f"{error.outliers:,}")
    return table


def _show(facts: Inspection, console: Console) -> None:
    state = "sealed" if facts.sealed else "NOT sealed: its build has not finished"
    console.print(Text(f"Target Cache {facts.url} ({state})", style="bold"), soft_wrap=True)
    settings = {"fingerprint": facts.fingerprint[:16], **facts.settings, **facts.identity}
    console.print(pairs_table("Identity", settings))
    share = facts.supervised_tokens / facts.tokens if facts.tokens else 0.0
    totals = {
        "samples": f"{facts.samples:,}",
        "tokens": f"{facts.tokens:,} ({share:.1%} supervised)",
        "shards": f"{facts.shards:,}",
        "stored": size_text(facts.stored_bytes),
        "of raw bf16": f"{facts.stored_bytes / facts.raw_bytes:.3f} x {size_text(facts.raw_bytes)}"
        if facts.raw_bytes
        else "-",
        "per token": size_text(facts.stored_bytes / facts.tokens) if facts.tokens else "-",
        "duplicates": f"{facts.duplicates:,} (repeated tasks; each sample is read once)",
        "finish reasons": ", ".join(f"{name} {count:,}" for name, count in facts.finish_reasons.items()) or "-",
    }
    console.print(pairs_table("Totals", totals))
    rejects = Table("stage", "reason", "prompts", title="Rejects", title_justify="left")
    for stage, reasons in facts.rejects.items():
        for reason, count in reasons.items():
            rejects.add_row(stage, Text(reason), f"{count:,}")
    console.print(rejects if facts.rejects else "Rejects: none")
    if facts.errors:
        console.print(errors_table(facts.errors))
    if facts.lengths:
        show_histogram(console, f"Tokens per sample (median {facts.length_median:.0f})", facts.lengths)
    if facts.layers:
        title = f"Values per layer ({facts.probed_samples} samples)"
        layers = Table("layer", "RMS", "largest", "largest after token 0", title=title, title_justify="left")
        for layer in facts.layers:
            layers.add_row(layer.layer, f"{layer.rms:.3g}", f"{layer.max_abs:.4g}", f"{layer.max_abs_after_first:.4g}")
        console.print(layers)
