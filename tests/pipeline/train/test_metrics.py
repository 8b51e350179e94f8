from __future__ import annotations

import json
from pathlib import Path

from pipeline.train.metrics import METRICS, MetricsWriter, read_metrics


def test_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, start_step=0) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step, {"loss": float(step)})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "lo')  # killed within a line
    with MetricsWriter(tmp_path, start_step=2) as writer:
        for step in (3, 4):
            writer.write(step, {"loss": 10.0 * step})
    records = read_metrics(tmp_path / METRICS)
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_every_line_is_json_even_for_infinite_values(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.write(1, {"grad_norm": float("inf"), "loss": float("nan"), "tau": 1.5})
    (line,) = (tmp_path / METRICS).read_text().splitlines()
    record = json.loads(line, parse_constant=no_json)
    assert (record["grad_norm"], record["loss"], record["tau"]) == (None, None, 1.5)
    assert list((tmp_path / "tensorboard").glob("events*"))


def no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_no_file_means_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / METRICS) == []
