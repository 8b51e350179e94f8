"""The Target Cache store beside its alternatives, in one run, on real hidden states of the demo target.

Sizes of both containers, errors of the bounded-loss codec, decoding against zstd on the raw bytes, random reads against
plain pread and against plain ranged GETs through a real S3 server (SeaweedFS), a shuffled epoch against WebDataset and
MosaicML Streaming, and the memory of a stream over a cache 100 times larger. The first run makes the states (some
minutes: the target answers the demo's prompts) and keeps them in build/bench; MosaicML Streaming, whose pins conflict
with ours, is installed there with --no-deps, and torchvision, which only its image datasets use, replaced by a stub.

    python benchmarks/cache.py [--only PART ...] [--output build/bench/cache.json] [--json]

Every figure named `a_vs_b` is a ratio of rates, ours over theirs. Tasks that are compared take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script's own folder stands there, not the one that holds `benchmarks`

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import cache_codecs, cache_epoch, cache_memory, cache_reads  # noqa: E402
from benchmarks.cache_data import raw_cache, variant  # noqa: E402
from cache_store.reader import CacheReader  # noqa: E402

FOLDER, TARGET, PROMPTS = Path("build/bench"), Path("build/demo/target"), Path("jobs/prompts/demo_train.jsonl")
WANTED: dict[str, tuple[str, float]] = {
    "lossless_ratio": ("<=", 0.70),
    "lossless_ratio_needed_last": ("<=", 0.66),
    "lossless_samples_that_differ": ("<=", 0.0),
    "decode_vs_zstd1_raw": (">=", 1.5),
    "i8cr_ratio": ("<=", 0.50),
    "i8cr_error_worst_tensor": ("<=", 0.01),
    "i8cr_total_variation": ("<=", 0.006),
    "i8cr_massive_error": ("<=", 0.01),
    "random_read_vs_pread": (">=", 0.8),
    "random_read_vs_s3_get": (">=", 0.8),
    "epoch_vs_webdataset": (">=", 1.0),
    "epoch_vs_mosaicml": (">=", 1.0),
    "stream_memory_vs_bound": ("<=", 1.0),
}
SUMMARY = (
    "lossless_ratio",
    "lossless_ratio_needed_last",
    "i8cr_ratio",
    "decode_vs_zstd1_raw",
    "random_read_vs_pread",
    "random_read_vs_s3_get",
    "epoch_vs_webdataset",
    "epoch_vs_mosaicml",
)


def epoch(source: CacheReader, folder: Path) -> dict[str, float]:
    """Our containers without compression, as the others are."""
    for form in cache_codecs.FORMATS:
        variant(source, folder, f"uncompressed-{form}", format=form, codec="raw")
    return cache_epoch.epochs(source, folder)


def parts(target: Path) -> dict[str, Callable[[CacheReader, Path], dict[str, float]]]:
    """The measurements by name."""
    return {
        "sizes": cache_codecs.sizes,
        "exact": cache_codecs.exactness,
        "errors": lambda source, folder: cache_codecs.bounded_errors(source, folder, target),
        "decode": cache_codecs.decode_speed,
        "local": cache_reads.local_reads,
        "s3": cache_reads.s3_reads,
        "epoch": epoch,
        "memory": cache_memory.memory,
    }


def verdict(name: str, value: float) -> str:
    """Whether a figure is as wanted; empty where nothing was asked."""
    if name not in WANTED:
        return ""
    sign, bound = WANTED[name]
    met = value <= bound if sign == "<=" else value >= bound
    return f"{sign} {bound:g}: {'yes' if met else 'NO'}"


def show(figures: dict[str, float], source: CacheReader) -> None:
    """The figures as a table."""
    megabytes = cache_codecs.raw_bytes(source) / 1e6
    title = f"Target Cache store: {len(source)} samples, {int(source.tokens.sum()):,} tokens, {megabytes:,.0f} MB raw"
    table = Table("figure", "value", "wanted", title=title, title_justify="left")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}", verdict(name, value))
    Console().print(table)


def main() -> None:
    """Measure, print the table, write the JSON file; with --json also one JSON line at the end."""
    os.chdir(ROOT)
    available = parts(TARGET)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=tuple(available), help="only this part; may be repeated")
    parser.add_argument("--output", type=Path, default=FOLDER / "cache.json", help="file for all figures")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    args = parser.parse_args()
    source = raw_cache(FOLDER, TARGET, PROMPTS)
    figures: dict[str, float] = {}
    for name in args.only or available:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        found = available[name](source, FOLDER)
        print("  " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), file=sys.stderr, flush=True)
        figures |= found
    show(figures, source)
    args.output.write_text(json.dumps({"benchmark": "cache", **figures}, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps({name: round(figures[name], 4) for name in SUMMARY if name in figures}))


if __name__ == "__main__":
    main()
