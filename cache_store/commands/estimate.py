"""`cache_store estimate`: the size of a cache for every codec and number of layers, before it is built.

From a config with a token histogram (or the config's own plan), or from an existing cache's lengths and bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from cache_store.commands.terminal import EXIT_OK, at_least, fraction, open_cache, pairs_table, wide_console
from cache_store.errors import CacheError
from cache_store.estimate import (
    MEASURED,
    Choice,
    Ratios,
    TokenCounts,
    estimate_bytes,
    measure_ratios,
    price_choices,
    read_histogram,
    size_text,
)
from cache_store.estimate_config import SUFFIXES, read_planned
from cache_store.reader import CacheReader
from cache_store.schema import CODECS, EXACT_CODECS, FORMAT_VERSION, CacheSpec

HELP = "size of a cache for every codec and number of layers, from a config (URL is its file) or from this cache"
PROBED_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Basis:
    """What the price is made from."""

    spec: CacheSpec
    counts: TokenCounts
    ratios: dict[str, Ratios]
    """By codec; of the cache's own bytes where there is one."""
    measured: tuple[str, ...]
    """Codecs whose factors come from this cache's samples."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--tokens", type=at_least(1), help="tokens of the cache; the mix of lengths stays")
    parser.add_argument("--histogram", type=Path, metavar="CSV", help="columns tokens,supervised,samples")
    parser.add_argument("--max-tokens", type=at_least(1), help="leave longer samples out")
    parser.add_argument("--sample-fraction", type=fraction, default=1.0, help="take only this share of the samples")
    parser.add_argument("--layers", help="numbers of captured layers to price, for instance 1,3,5 (default: all)")
    parser.add_argument("--target-config", type=Path, metavar="JSON", help="the target's config.json (with a config)")


def run(options: argparse.Namespace) -> int:
    """Print the estimate; returns the exit code."""
    planned = options.url.endswith(SUFFIXES) and Path(options.url).is_file()
    basis = _from_config(options) if planned else _from_cache(open_cache(options), options)
    spec, counts = basis.spec, basis.counts
    chosen = Ratios(captured=basis.ratios[spec.codec].captured, last=basis.ratios[spec.last_codec].last)
    share = counts.supervised / counts.tokens if counts.tokens else 0.0
    found = estimate_bytes(spec, counts.tokens, share, samples=counts.samples, ratios=chosen)
    choices = price_choices(spec, counts, _layer_numbers(options.layers, spec), basis.ratios)
    if options.json:
        facts = {**asdict(counts), **asdict(found), "ratios": asdict(chosen), "measured": basis.measured}
        print(json.dumps({**facts, "choices": [asdict(choice) for choice in choices]}))
        return EXIT_OK
    source = f"{', '.join(basis.measured)} by this cache's samples" if basis.measured else "as measured on SmolLM2-135M"
    rows = {
        "tokens": f"{counts.tokens:,} ({share:.1%} supervised) in {counts.samples:,} samples",
        "raw bf16": size_text(found.raw_bytes),
        "stored": f"{size_text(found.stored_bytes)} in {found.shards:,} shards of {size_text(spec.shard_bytes)}",
        "stored as": f"{spec.format}, {spec.codec}, last hidden state {spec.last_codec} where {spec.last_hidden}",
        "stored per raw byte": f"{chosen.captured:.3f} captured layers, {chosen.last:.3f} last hidden state",
        "factors": source,
    }
    console = wide_console()
    console.print(pairs_table("Estimate", rows))
    console.print(_choices_table(spec, choices))
    return EXIT_OK


def _from_config(options: argparse.Namespace) -> Basis:
    planned = read_planned(Path(options.url), options.target_config)
    if options.histogram is not None:
        counts = _limited(read_histogram(options.histogram), options)
    elif planned.counts is not None and options.max_tokens is None:
        counts = planned.counts.scaled(options.sample_fraction)
    else:
        raise CacheError(
            f"{options.url}: its plan section says too little about lengths (samples, prompt_tokens, response_tokens); "
            "give --histogram, a CSV with the columns tokens,supervised,samples"
        )
    return Basis(planned.spec, _of_size(counts, options.tokens), dict(MEASURED), ())


def _from_cache(reader: CacheReader, options: argparse.Namespace) -> Basis:
    if len(reader) == 0:
        raise CacheError(f"{options.url} holds no samples to measure; estimate from the config instead")
    spec = replace(reader.spec, format_version=FORMAT_VERSION)  # what a build or `convert` of today would write
    probed = [reader.read(int(p)) for p in np.linspace(0, len(reader) - 1, PROBED_SAMPLES).astype(int)]
    # States that went through a bounded-loss codec compress differently from the target's own.
    exact = reader.spec.codec in EXACT_CODECS and reader.spec.last_codec in EXACT_CODECS
    measured: tuple[str, ...] = CODECS if exact else ()
    ratios = dict(MEASURED)
    for tag in measured:
        last = "bss1" if tag == "f8r" else tag
        ratios[tag] = measure_ratios(replace(spec, codec=tag, last_codec=last), probed)
    if not exact:
        own = measure_ratios(reader.spec, probed)
        ratios[reader.spec.codec] = replace(ratios[reader.spec.codec], captured=own.captured)
        ratios[reader.spec.last_codec] = replace(ratios[reader.spec.last_codec], last=own.last)
        measured = tuple(dict.fromkeys((reader.spec.codec, reader.spec.last_codec)))
    if options.histogram is not None:
        histogram = read_histogram(options.histogram)
    else:
        histogram = (reader.tokens, reader.supervised_tokens, np.ones(len(reader), np.int64))
    return Basis(spec, _of_size(_limited(histogram, options), options.tokens), ratios, measured)


def _limited(histogram: tuple[np.ndarray, np.ndarray, np.ndarray], options: argparse.Namespace) -> TokenCounts:
    tokens, supervised, samples = histogram
    kept = np.ones(len(tokens), bool) if options.max_tokens is None else tokens <= options.max_tokens
    return TokenCounts.of(tokens[kept], supervised[kept], samples[kept]).scaled(options.sample_fraction)


def _of_size(counts: TokenCounts, tokens: int | None) -> TokenCounts:
    if counts.tokens == 0:
        raise CacheError("no sample is left to price; raise --max-tokens or --sample-fraction")
    return counts if tokens is None else counts.scaled(tokens / counts.tokens)


def _layer_numbers(text: str | None, spec: CacheSpec) -> list[int]:
    if text is None:
        return list(range(1, spec.num_layers + 1))
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    most = spec.num_target_layers  # the embedding's output, and all layers but the last
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise CacheError(f"--layers is {text!r}, wanted whole numbers from 1 to {most}, for instance 1,3,5")
    return numbers


def _choices_table(spec: CacheSpec, choices: list[Choice]) -> Table:
    """One line per codec of the two fields, one column per number of layers; the chosen format and place alone."""
    title = f"Other choices as {spec.format}, last hidden state where {spec.last_hidden} (all of them: --json)"
    shown = [choice for choice in choices if (choice.format, choice.last_hidden) == (spec.format, spec.last_hidden)]
    numbers = list(dict.fromkeys(choice.layers for choice in shown))
    heads = [f"{number} layer{'s' * (number > 1)}" for number in numbers]
    table = Table("captured", "last", *heads, title=title, title_justify="left")
    for codecs in dict.fromkeys((choice.codec, choice.last_codec) for choice in shown):
        sizes = [c.stored_bytes for c in shown if (c.codec, c.last_codec) == codecs]
        table.add_row(*codecs, *map(size_text, sizes))
    return table
