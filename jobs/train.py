"""Train the drafter with DeepSpeed on a Target Cache: `python jobs/train.py --config jobs/configs/smollm2_demo.yaml`.

Continues from the newest complete checkpoint in training.output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.cli import EXIT_OK, run_job
from pipeline.config import Config
from pipeline.plan import assumed_plan
from pipeline.train.recipe import prepare_job
from pipeline.train.run import describe, run_training


def train(config: Config, dry_run: bool) -> int:
    """Train, or with `dry_run` check everything and say what would run."""
    if dry_run:
        print(assumed_plan(config) or describe(prepare_job(config)))
    else:
        print(run_training(config).text())
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return run_job(__doc__ or "", train, argv)


if __name__ == "__main__":
    sys.exit(main())
