from __future__ import annotations

import io
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.telemetry import Progress, format_duration


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_line_rate_eta_and_failures(tmp_path: Path) -> None:
    clock, out = _Clock(), io.StringIO()
    progress = Progress("extract", 100, already=20, interval=10, stream=out, clock=clock, log_file=tmp_path / "log")
    clock.now = 10.0
    progress.update(40, failed=2)
    assert out.getvalue() == "extract      60/100 samples (60 %) | 4.0 samples/s | ETA --:-- | failed 2\n"
    clock.now = 12.0
    progress.update(10)
    assert out.getvalue().count("\n") == 1, "a second line before the interval has passed"
    record = progress.finish("done")
    assert record.done == 70
    assert out.getvalue().endswith("| 5.0 samples/s | ETA 00:06 | failed 2 | done\n")
    progress.finish("done")
    assert out.getvalue().count("\n") == 2, "the last line stands there already"
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [entry["done"] for entry in logged] == [60, 70]


def test_nothing_done_has_no_eta() -> None:
    clock = _Clock()
    progress = Progress("train", 10, stream=io.StringIO(), clock=clock)
    clock.now = 3.0
    assert progress.record().eta is None
    assert "ETA --:--" in progress.record().line()


def test_the_pace_is_that_of_the_units_and_not_of_the_engine_start() -> None:
    clock = _Clock()
    progress = Progress("regenerate", 100, stream=io.StringIO(), clock=clock)
    clock.now = 60.0
    progress.update(10)
    assert progress.record().rate == 10 / 60
    clock.now = 70.0
    progress.update(20)
    assert (progress.record().rate, progress.record().eta) == (2.0, 35.0)
    clock.now = 80.0
    assert progress.record().rate == 1.0
    assert progress.record().elapsed == 80.0


def test_a_stage_without_news_speaks_more_and_more_rarely_but_never_falls_silent() -> None:
    clock, out = _Clock(), io.StringIO()
    progress = Progress("regenerate", 100, interval=10, stream=out, clock=clock)
    printed = []
    for now in range(0, 305, 5):
        clock.now = float(now)
        lines = out.getvalue().count("\n")
        progress.update(detail="starting the engine")
        if out.getvalue().count("\n") > lines:
            printed.append(now)
    assert printed == [0, 10, 30, 70, 130, 190, 250]
    clock.now = 310.0
    progress.update(5)
    assert "5/100" in out.getvalue().splitlines()[-1], "news wait for one interval only"


def test_empty_stage_is_complete() -> None:
    assert "(100 %)" in Progress("x", 0, stream=io.StringIO()).finish().line()


@given(st.integers(0, 10**7))
def test_duration_is_read_back(seconds: int) -> None:
    value = 0
    for part in format_duration(seconds).split(":"):
        value = value * 60 + int(part)
    assert value == seconds
