"""Measure the target's steps per second by tokens per forward pass, and what drafting costs, on the present device.

`python jobs/measure_cost.py --config <yaml> [section.key=value ...]`; see docs/serving.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.cli import EXIT_OK, run_job
from pipeline.config import Config
from pipeline.costs import run_measurement


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement; returns the exit code."""
    return run_job(__doc__ or "", _measure, argv)


def _measure(config: Config, dry_run: bool) -> int:
    run_measurement(config, dry_run=dry_run)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
