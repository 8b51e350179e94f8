"""`cache_store`: look at a cache, prove it whole, read its texts, size a larger one.

Exit codes: 0 fine, 1 damage or an error (one line on stderr), 2 wrong usage, 3 sound, but a crash left orphans.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_store.audit import verify_cache
from cache_store.errors import CacheError
from cache_store.estimate import Ratios, estimate_bytes, measure_ratios
from cache_store.inspection import Inspection, inspect_cache, segments
from cache_store.reader import CacheReader
from cache_store.schema import TargetSample
from cache_store.storage import open_storage

EXIT_OK, EXIT_FAILED, EXIT_ORPHANS = 0, 1, 3
BAR_WIDTH = 40
Decode = Callable[[list[int]], str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except CacheError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cache_store", description="Look at a Target Cache. " + EXIT_HELP)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("url", metavar="URL", help="folder or s3://bucket/prefix of the cache")
        sub.add_argument("--endpoint-url", help="S3 endpoint, where it is not AWS")
        sub.add_argument("--json", action="store_true", help="machine-readable output")
        sub.set_defaults(run=run)
        return sub

    inspect = command("inspect", _inspect, "identity, totals, shards, rejects, lengths and facts per layer")
    inspect.add_argument("--no-probe", action="store_true", help="do not read states for the facts per layer")
    verify = command("verify", _verify, "check every shard against its record: sizes, checksums, ids, finite states")
    verify.add_argument("--quick", action="store_true", help="records and sizes only, no shard is read")
    sample = command("sample", _sample, "print samples, supervised text [[apart]] from context")
    sample.add_argument("--n", type=int, default=3, help="how many, drawn at random (default 3)")
    sample.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    sample.add_argument("--id", action="append", help="this sample instead; may be repeated")
    sample.add_argument("--tokenizer", metavar="DIR", help="folder with the target's tokenizer.json; else token ids")
    sample.add_argument("--plain", action="store_true", help="no colours")
    estimate = command("estimate", _estimate, "size of a cache with these settings, from this one's measured bytes")
    estimate.add_argument("--tokens", type=int, required=True, help="tokens of the larger cache")
    return parser


EXIT_HELP = "Exit codes: 0 fine, 1 damage or error, 2 wrong usage, 3 sound but a crash left orphans."


def _open(options: argparse.Namespace) -> CacheReader:
    return CacheReader(open_storage(options.url, endpoint_url=options.endpoint_url), allow_unsealed=True)


def _inspect(options: argparse.Namespace) -> int:
    facts = inspect_cache(_open(options), probe=not options.no_probe)
    if options.json:
        print(json.dumps(asdict(facts)))
    else:
        _show(facts, Console())
    return EXIT_OK


def _show(facts: Inspection, console: Console) -> None:
    state = "sealed" if facts.sealed else "NOT sealed: its build has not finished"
    console.print(Text(f"Target Cache {facts.url} ({state})", style="bold"), soft_wrap=True)
    settings = {"fingerprint": facts.fingerprint[:16], **facts.settings, **facts.identity}
    console.print(_pairs("Identity", settings))
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
    console.print(_pairs("Totals", totals))
    rejects = Table("stage", "reason", "prompts", title="Rejects", title_justify="left")
    for stage, reasons in facts.rejects.items():
        for reason, count in reasons.items():
            rejects.add_row(stage, Text(reason), f"{count:,}")
    console.print(rejects if facts.rejects else "Rejects: none")
    _show_lengths(facts, console)
    if facts.layers:
        title = f"Values per layer ({facts.probed_samples} samples)"
        layers = Table("layer", "RMS", "largest", "largest after token 0", title=title, title_justify="left")
        for layer in facts.layers:
            layers.add_row(layer.layer, f"{layer.rms:.3g}", f"{layer.max_abs:.4g}", f"{layer.max_abs_after_first:.4g}")
        console.print(layers)


def _show_lengths(facts: Inspection, console: Console) -> None:
    if not facts.lengths:
        return
    console.print(f"Tokens per sample (median {facts.length_median:.0f})")
    most = max(item.samples for item in facts.lengths)
    for item in facts.lengths:
        bar = "█" * round(BAR_WIDTH * item.samples / most) or ("▏" if item.samples else "")
        console.print(Text(f"{item.low:>7,}-{item.high:<7,} {bar} {item.samples:,}"))


def _pairs(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        table.add_row(name, Text(shown, overflow="fold"))
    return table


def size_text(count: float) -> str:
    """Bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"


def _verify(options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    storage = open_storage(options.url, endpoint_url=options.endpoint_url)
    with console.status("verifying") as status:
        report = verify_cache(
            storage, quick=options.quick, progress=lambda done, total: status.update(f"verified {done}/{total} shards")
        )
    if options.json:
        findings = [asdict(finding) for finding in report.findings]
        print(json.dumps({**asdict(report), "damaged": report.damaged, "findings": findings}))
    else:
        if report.findings:
            table = Table("finding", "object", "detail", title="Findings", title_justify="left")
            for finding in report.findings:
                table.add_row(finding.kind, Text(finding.name, overflow="fold"), Text(finding.detail, overflow="fold"))
            Console().print(table)
        verdict = "DAMAGED" if report.damaged else "sound, with orphans" if report.findings else "sound"
        looked = f"{report.shards:,} shards, {report.samples:,} samples, {size_text(report.num_bytes)}"
        print(f"{verdict}: {looked}, {len(report.findings)} findings{' (quick: no shard was read)' * options.quick}")
    if report.damaged:
        return EXIT_FAILED
    return EXIT_ORPHANS if report.findings else EXIT_OK


def _sample(options: argparse.Namespace) -> int:
    reader = _open(options)
    decode = load_decoder(options.tokenizer) if options.tokenizer else None
    if options.id:
        positions = [reader.position(sample_id) for sample_id in options.id]
    else:
        drawn = np.random.default_rng(options.seed).permutation(len(reader))[: max(0, options.n)]
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
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _estimate(options: argparse.Namespace) -> int:
    reader = _open(options)
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
    Console().print(_pairs("Estimate", rows))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
