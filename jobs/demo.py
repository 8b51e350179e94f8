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
    config_path = parser.parse_known_args(argv)[0].config
    return run_job(__doc__ or "", lambda config, dry_run: 0 if dry_run else run_demo(config, config_path), argv)


if __name__ == "__main__":
    sys.exit(main())
