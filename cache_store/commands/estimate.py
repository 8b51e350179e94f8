"""`cache_store estimate`: the size of a larger cache from this one's measured bytes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import numpy as np
from rich.console import Console

from cache_store.commands.terminal import EXIT_OK, open_cache, pairs_table, size_text
from cache_store.errors import CacheError
from cache_store.estimate import Ratios, estimate_bytes, measure_ratios

HELP = "size of a cache with these settings, from this one's measured bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--tokens", type=int, required=True, help="tokens of the larger cache")


def run(options: argparse.Namespace) -> int:
    """Print the estimate; returns the exit code."""
    reader = open_cache(options)
    if len(reader) == 0:
        raise CacheError(f"{options.url} holds no samples to measure; estimate from the config with a dry run instead")
    probed = [reader.read(int(position)) for position in np.linspace(0, len(reader) - 1, 8).astype(int)]
    ratios: Ratios = measure_ratios(reader.spec, probed)
    tokens, supervised = int(reader.tokens.sum()), int(reader.supervised_tokens.sum())
    samples = max(1, round(options.tokens * len(reader) / tokens))
    found = estimate_bytes(reader.spec, options.tokens, supervised / tokens, samples=samples, ratios=ratios)
    facts = {"tokens": options.tokens, "samples": samples, **asdict(found), "ratios": asdict(ratios)}
    if options.json:
        print(json.dumps(facts))
        return EXIT_OK
    rows = {
        "tokens": f"{options.tokens:,} in about {samples:,} samples",
        "raw bf16": size_text(found.raw_bytes),
        "stored": f"{size_text(found.stored_bytes)} in {found.shards:,} shards",
        "stored per raw byte": f"{ratios.captured:.3f} captured layers, {ratios.last:.3f} last hidden state",
    }
    Console().print(pairs_table("Estimate", rows))
    return EXIT_OK
