"""The scheduler benchmark's plain Python twin by hand, and the line that it ends with."""

from __future__ import annotations

import json

import pytest

from benchmarks import scheduler
from benchmarks.scheduler import median_us, plain_schedule, run


def test_the_plain_algorithm_on_the_worked_example() -> None:
    seconds = [1 / speed for speed in (1.0, 0.95, 0.52, 0.48)]
    found = plain_schedule([[0.8, 0.7, 0.9]], seconds, [3])
    assert found.lengths == [1]
    assert found.expected_tokens == pytest.approx(1.8)
    assert found.tokens_per_second == pytest.approx(1.71)
    assert plain_schedule([[0.8, 0.7]], seconds, [0]).lengths == [0]
    assert plain_schedule([[0.5], [0.9]], [1.0] * 3, [1, 1]).lengths == [0, 1]  # the table ends at three tokens


def test_the_median_is_per_call() -> None:
    calls = []
    assert median_us(lambda: calls.append(1), 5, 3) > 0
    assert len(calls) == 15


def test_json_ends_the_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scheduler, "run", lambda: run(repeats=1))
    scheduler.main(["--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"single_us", "batch256_us", "plain_single_us", "plain_batch256_us"} <= figures.keys()
    assert 0 < figures["admitted"] < 256 * 7
