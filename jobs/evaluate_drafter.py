"""Measure the trained drafter on held-out prompts by real speculative decoding.

`python jobs/evaluate_drafter.py --config <yaml> [section.key=value ...]`; the report ends on the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.cli import EXIT_OK, run_job
from pipeline.config import Config
from pipeline.evaluate import run_evaluation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluation; returns the exit code."""
    return run_job(__doc__ or "", _evaluate, argv)


def _evaluate(config: Config, dry_run: bool) -> int:
    run_evaluation(config, dry_run=dry_run)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
