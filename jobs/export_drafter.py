"""Export a drafter in the layout that vLLM and SGLang load, and say what they will do with it.

`python jobs/export_drafter.py --config <yaml> [--checkpoint DIR] [--output DIR] [--self-contained] [--dry-run]`;
docs/export.md explains what it prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.cli import EXIT_OK, run_job
from pipeline.config import Config
from pipeline.export import ExportOptions, run_export


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export; returns the exit code."""
    options = _options()
    own, _ = options.parse_known_args(argv)
    chosen = ExportOptions(output=own.output, checkpoint=own.checkpoint, self_contained=own.self_contained)

    def export(config: Config, dry_run: bool) -> int:
        print("\n".join(run_export(config, chosen, dry_run=dry_run).lines()), flush=True)
        return EXIT_OK

    return run_job(__doc__ or "", export, argv, options=options)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output", type=Path, help="folder to write; default: <training.output>/export")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a training checkpoint, or a folder with an exported or released drafter; default: the run's newest",
    )
    parser.add_argument(
        "--self-contained", action="store_true", help="add the target's embedding and lm_head to the checkpoint"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
