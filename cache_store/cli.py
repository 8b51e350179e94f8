"""`cache_store`: look at a cache, prove it whole, put it right, read its texts, size a larger one.

Exit codes: 0 fine, 1 damage, a difference or an error (one line on stderr), 2 wrong usage, 3 sound, but a crash left
orphans, 4 repaired, but the build has to run again, 130 interrupted, 141 the output was closed early.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from cache_store.commands import convert, diff, estimate, gc, head, inspect, repair, sample, stats, verify
from cache_store.commands.terminal import EXIT_FAILED, EXIT_INTERRUPTED, leave_pipe
from cache_store.errors import CacheError

COMMANDS = {
    "inspect": inspect,
    "head": head,
    "stats": stats,
    "verify": verify,
    "repair": repair,
    "gc": gc,
    "diff": diff,
    "convert": convert,
    "sample": sample,
    "estimate": estimate,
}
EXIT_HELP = (
    "Exit codes: 0 fine, 1 damage, difference or error, 2 wrong usage, 3 sound but a crash left orphans, "
    "4 repaired but the build has to run again."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? for what it lacks
    try:
        code: int = options.run(options)
        print(end="", flush=True)
        return code
    except CacheError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (BrokenPipeError, SystemExit):  # the reader, such as `head`, has seen enough; rich makes it SystemExit
        return leave_pipe()
    except KeyboardInterrupt:
        print("interrupted: run the same command to continue or to begin again", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return leave_pipe(EXIT_FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cache_store", description="Look at a Target Cache. " + EXIT_HELP)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        sub.add_argument("url", metavar="URL", help="folder or s3://bucket/prefix of the cache")
        sub.add_argument("--endpoint-url", help="S3 endpoint, where it is not AWS")
        sub.add_argument("--json", action="store_true", help="machine-readable output")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
