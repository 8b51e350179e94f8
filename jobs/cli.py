"""What every job does around its one call: parse, load the config, print one clear line on failure."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence

from cache_store.commands.terminal import leave_pipe
from cache_store.errors import CacheError
from model.errors import ModelError
from pipeline.config import Config, dump_config, load_config
from pipeline.errors import ConfigError, PipelineError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130
# The machine's state, not ours: a line says all there is to say. Other OSErrors keep their traceback.
_SURROUNDINGS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}


def run_job(
    description: str,
    call: Callable[[Config, bool], int],
    argv: Sequence[str] | None = None,
    *,
    options: argparse.ArgumentParser | None = None,
) -> int:
    """Parse `--config FILE [section.key=value ...] [--dry-run] [--print-config]` and call `call(config, dry_run)`.

    `options`: the job's own options (a parser without help), which the job has read by parse_known_args.
    Returns the exit code: the call's own, 1 for a failed run, 2 for a wrong config, 130 when interrupted, 141 when
    its output was closed early.
    """
    parser = argparse.ArgumentParser(description=description, parents=[options] if options else [])
    parser.add_argument("--config", required=True, help="YAML file, for instance jobs/configs/smollm2_demo.yaml")
    parser.add_argument("--dry-run", action="store_true", help="validate, price the job and stop")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override config values")
    args = parser.parse_intermixed_args(argv)  # overrides may stand on both sides of an option
    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            print(dump_config(config), end="", flush=True)
            return EXIT_OK
        return call(config, args.dry_run)
    except ConfigError as error:
        return _fail(error, EXIT_BAD_CONFIG)
    except (PipelineError, CacheError, ModelError) as error:
        return _fail(error, EXIT_FAILED)
    except OSError as error:
        return _fail_outside(error)
    except KeyboardInterrupt:
        print("interrupted: run the same command to continue", file=sys.stderr)
        return EXIT_INTERRUPTED


def _fail_outside(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
        return leave_pipe()
    if error.errno not in _SURROUNDINGS:
        raise error
    print(f"{error}: free space, or name a place that can be written; then run the same command", file=sys.stderr)
    return EXIT_FAILED


def _fail(error: Exception, code: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code
