"""Build a Target Cache: `python jobs/build_cache.py --config <yaml> [section.key=value ...]`; again to continue.

Exit code 0: complete. 3: complete, but some prompts were rejected. 1: failed. 2: wrong config.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.cli import run_job
from pipeline.build import EXIT_COMPLETE_WITH_REJECTS, run_build
from pipeline.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the build; returns the exit code."""
    return run_job(__doc__ or "", _build, argv)


def _build(config: Config, dry_run: bool) -> int:
    report = run_build(config, dry_run=dry_run)
    if report is None:
        return 0
    print("\n".join(report.lines()), flush=True)
    return EXIT_COMPLETE_WITH_REJECTS if report.rejected else 0


if __name__ == "__main__":
    sys.exit(main())
