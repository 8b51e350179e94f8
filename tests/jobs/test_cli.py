from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache_store.errors import CacheError
from jobs.cli import run_job
from model.errors import ModelError
from pipeline.config import Config
from pipeline.errors import ConfigError, PipelineError

DEMO = str(Path(__file__).resolve().parents[2] / "jobs" / "configs" / "smollm2_demo.yaml")


def test_call_gets_config_and_dry_run() -> None:
    seen: list[tuple[str, bool]] = []

    def call(config: Config, dry_run: bool) -> int:
        seen.append((config.name, dry_run))
        return 3

    assert run_job("x", call, ["--config", DEMO, "--dry-run", "name=other"]) == 3
    assert seen == [("other", True)]


def test_overrides_stand_on_either_side_of_an_option() -> None:
    seen: list[tuple[str, float]] = []

    def call(config: Config, dry_run: bool) -> int:
        seen.append((config.name, config.training.lr))
        return 0

    assert run_job("x", call, ["--config", DEMO, "name=other", "--dry-run", "training.lr=1.0"]) == 0
    assert seen == [("other", 1.0)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad"), 2),
        (PipelineError("broke"), 1),
        (CacheError("broke"), 1),
        (ModelError("broke"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/dev/null/x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_are_one_line(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def call(config: Config, dry_run: bool) -> int:
        raise error

    assert run_job("x", call, ["--config", DEMO]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "absent", "x")])
def test_unexpected_errors_keep_their_traceback(error: Exception) -> None:
    def call(config: Config, dry_run: bool) -> int:
        raise error

    with pytest.raises(type(error)):
        run_job("x", call, ["--config", DEMO])


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job("x", lambda config, dry_run: 9, ["--config", DEMO, "--print-config"]) == 0
    assert "markov_rank: 64" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    command = [sys.executable, "jobs/train.py", "--config", DEMO, "--print-config"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, env={**os.environ, "PYTHONPATH": "."}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_unknown_key_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_job("x", lambda config, dry_run: 0, ["--config", DEMO, "nme=1"]) == 2
    assert "did you mean 'name'?" in capsys.readouterr().err
