from __future__ import annotations

from pathlib import Path

import pytest

from jobs.simulate_serving import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ["--config", str(ROOT / "jobs" / "configs" / "smollm2_demo.yaml")]
TABLE = f"simulation.cost_table={ROOT / 'jobs' / 'configs' / 'costs' / 'h200_like.json'}"


def test_dry_run_names_what_it_would_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main([*CONFIG, TABLE, f"simulation.output={output}", "simulation.concurrency=[1,2]", "--dry-run"]) == 0
    assert "8 policies at 2 loads" in capsys.readouterr().out
    assert not output.exists()


def test_wrong_settings_are_a_wrong_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONFIG, TABLE, "simulation.concurrency=[4096]"]) == 2
    assert "simulate up to 256 requests" in capsys.readouterr().err


def test_no_table_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONFIG, f"simulation.cost_table={tmp_path / 'none.json'}"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
