"""`cache_store sample`: texts of some samples, supervised parts apart from context."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from cache_store.commands.terminal import EXIT_OK, at_least, open_cache
from cache_store.errors import CacheError
from cache_store.inspection import segments
from cache_store.reader import CacheReader
from cache_store.schema import TargetSample

HELP = "print samples, supervised text [[apart]] from context"
Decode = Callable[[list[int]], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--n", type=at_least(0), default=3, help="how many, drawn at random (default 3)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the draw (default 0)")
    parser.add_argument("--id", action="append", help="this sample instead; may be repeated")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder with the target's tokenizer.json; else token ids")
    parser.add_argument("--plain", action="store_true", help="no colours")


def run(options: argparse.Namespace) -> int:
    """Print the chosen samples; returns the exit code."""
    reader = open_cache(options)
    decode = load_decoder(options.tokenizer) if options.tokenizer else None
    if options.id:
        positions = [reader.position(sample_id) for sample_id in options.id]
    else:
        drawn = np.random.default_rng(options.seed).permutation(len(reader))[: options.n]
        positions = [int(position) for position in drawn]
    console = Console(no_color=options.plain, highlight=False)
    for position in positions:
        sample = reader.read(position, states=False)
        if options.json:
            print(json.dumps(_sample_facts(reader, position, sample, decode), ensure_ascii=False))
        else:
            _show_sample(console, sample, decode)
    return EXIT_OK


def _sample_facts(reader: CacheReader, position: int, sample: TargetSample, decode: Decode | None) -> dict[str, Any]:
    parts = [
        {"supervised": part.supervised, "ids": part.ids, "text": decode(part.ids) if decode else None}
        for part in segments(sample)
    ]
    shard = reader.shard_of(position)
    return {"sample_id": sample.sample_id, "shard": shard, "metadata": sample.metadata, "segments": parts}


def _show_sample(console: Console, sample: TargetSample, decode: Decode | None) -> None:
    head = f"── {sample.sample_id}: {len(sample.input_ids)} tokens, {int(sample.loss_mask.sum())} supervised"
    console.print(Text(f"{head}, {json.dumps(sample.metadata, ensure_ascii=False)}", style="bold"), soft_wrap=True)
    text = Text()
    for part in segments(sample):
        shown = decode(part.ids) if decode else " ".join(map(str, part.ids))
        if part.supervised:
            text.append(f"[[{shown}]]", style="green")
        else:
            text.append(shown if decode else f" {shown} ", style="dim")
    console.print(text, soft_wrap=True)


def load_decoder(folder: str) -> Decode:
    """Token ids -> text, special tokens shown. Raises CacheError when there is no readable tokenizer.json."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CacheError("--tokenizer needs the package `tokenizers` (pip install tokenizers)") from error
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CacheError(f"{path} does not exist; --tokenizer wants the target's folder in Hugging Face layout")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise CacheError(f"{path} is not a readable tokenizer: {error}") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
