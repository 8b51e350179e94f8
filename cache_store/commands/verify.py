"""`cache_store verify`: every shard against its record."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from cache_store.audit import verify_cache
from cache_store.commands.progress import audit_bar
from cache_store.commands.terminal import EXIT_FAILED, EXIT_OK, EXIT_ORPHANS, storage_of, wide_console
from cache_store.estimate import size_text

HELP = "check every shard against its record: sizes, checksums, ids, finite states"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--quick", action="store_true", help="records and sizes only, no shard is read")


def run(options: argparse.Namespace) -> int:
    """Print findings and the verdict; returns the exit code."""
    storage = storage_of(options)
    with audit_bar("verifying") as progress:
        report = verify_cache(storage, quick=options.quick, progress=progress)
    if options.json:
        findings = [asdict(finding) for finding in report.findings]
        print(json.dumps({**asdict(report), "damaged": report.damaged, "findings": findings}))
    else:
        if report.findings:
            table = Table("finding", "object", "detail", title="Findings", title_justify="left")
            for finding in report.findings:
                table.add_row(finding.kind, Text(finding.name, overflow="fold"), Text(finding.detail, overflow="fold"))
            wide_console().print(table)
        unfinished = {finding.kind for finding in report.findings if finding.damage} == {"not-sealed"}
        damaged = "NOT SEALED" if unfinished else "DAMAGED"
        verdict = damaged if report.damaged else "sound, with orphans" if report.findings else "sound"
        looked = f"{report.shards:,} shards, {report.samples:,} samples, {size_text(report.num_bytes)}"
        print(f"{verdict}: {looked}, {len(report.findings)} findings{' (quick: no shard was read)' * options.quick}")
        if unfinished:
            print("run the same build again: it finishes what is missing, and seals")
        elif report.damaged:
            print(f"put it right: cache_store repair {options.url}")
        elif report.findings:
            print(f"remove what is left over: cache_store gc {options.url} --delete")
    if report.damaged:
        return EXIT_FAILED
    return EXIT_ORPHANS if report.findings else EXIT_OK
