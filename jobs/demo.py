"""The whole main job on the demo target: `python jobs/demo.py --config jobs/configs/smollm2_demo.yaml`."""

from __future__ import annotations

import argparse
import sys

from jobs.cli import run_job
from pipeline.demo import run_demo


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config")
    own, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if not word.startswith("-")]
    return run_job(
        __doc__ or "", lambda config, dry_run: run_demo(config, own.config, overrides, dry_run=dry_run), argv
    )


if __name__ == "__main__":
    sys.exit(main())
