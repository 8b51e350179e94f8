"""Simulate serving under load with every verification policy, from a cost table and an acceptance trace.

`python jobs/simulate_serving.py --config <yaml> [section.key=value ...]`; see docs/serving.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.cli import EXIT_OK, run_job
from pipeline.config import Config
from pipeline.serving import run_simulation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation; returns the exit code."""
    return run_job(__doc__ or "", _simulate, argv)


def _simulate(config: Config, dry_run: bool) -> int:
    run_simulation(config, dry_run=dry_run)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
