"""Calibrate the drafter's confidences on the rounds that an evaluation recorded.

`python jobs/calibrate_drafter.py --config <yaml> [section.key=value ...]`; writes calibration.json and the drafter's
config.json, and draws the reliability diagram into the evaluation's report.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.cli import EXIT_OK, run_job
from pipeline.calibrate import run_calibration
from pipeline.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calibration; returns the exit code."""
    return run_job(__doc__ or "", _calibrate, argv)


def _calibrate(config: Config, dry_run: bool) -> int:
    run_calibration(config, dry_run=dry_run)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
