"""`cache_store repair`: move damage aside, or list it for training to do without."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from cache_store.commands.progress import audit_bar
from cache_store.commands.terminal import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_OK, storage_of, wide_console
from cache_store.repair import BUILD_AGAIN, RepairReport, exclude_damage, repair_cache

HELP = "move damaged shards aside so that the same build makes them anew, and seal again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--quick", action="store_true", help="look at records and sizes only, read no shard")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, change nothing")
    parser.add_argument(
        "--exclude",
        action="store_true",
        help="move nothing: write a list of the damaged samples, which a run names in its config to do without them",
    )
    parser.add_argument(
        "--sample",
        action="append",
        default=[],
        metavar="ID",
        help="with --exclude: list this sample too, damaged or not (may be given more than once)",
    )


def run(options: argparse.Namespace) -> int:
    """Print what was done; returns the exit code: 0 whole, 1 damage is left, 4 the build has to run again."""
    if options.exclude:
        return _exclude(options)
    if options.sample:
        print("--sample goes with --exclude: repair itself acts on damage alone", file=sys.stderr)
        return EXIT_FAILED
    with audit_bar("verifying") as progress:
        report = repair_cache(storage_of(options), quick=options.quick, dry_run=options.dry_run, progress=progress)
    if options.json:
        print(json.dumps({**asdict(report), "whole": report.whole}, ensure_ascii=False))
    else:
        _show(report, options)
    if any(step.kind == "left" for step in report.steps):
        return EXIT_FAILED
    return EXIT_INCOMPLETE if report.needs_build else EXIT_OK


def _show(report: RepairReport, options: argparse.Namespace) -> None:
    if report.steps:
        title = "Repair (dry run: nothing was changed)" if options.dry_run else "Repair"
        table = Table("step", "object", "reason", title=title, title_justify="left")
        for step in report.steps:
            table.add_row(step.kind, Text(step.name, overflow="fold"), Text(step.reason, overflow="fold"))
        wide_console().print(table)
    if report.needs_build:
        print(f"{len(report.lost):,} committed samples are missing or the seal is; {BUILD_AGAIN}: it makes only those")
    elif report.whole:
        print("whole" if not report.steps else "whole again")
    else:
        print("damage is left that only a new build can mend")


def _exclude(options: argparse.Namespace) -> int:
    if options.dry_run:
        print("--exclude changes nothing but its own list; run it without --dry-run, or `cache_store verify`")
        return EXIT_FAILED
    with audit_bar("verifying") as progress:
        name, found = exclude_damage(
            storage_of(options), sample_ids=options.sample, quick=options.quick, progress=progress
        )
    if options.json:
        print(json.dumps({"exclusions": name, "samples": [asdict(item) for item in found]}, ensure_ascii=False))
    elif name is None:
        print("nothing is damaged, no list was written")
    else:
        print(f"{len(found):,} samples are listed; train without them: cache.exclusions={name}")
        if options.sample:
            print("a list knows nothing of earlier ones: name their samples again to keep them out")
    return EXIT_OK
