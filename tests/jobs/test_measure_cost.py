from __future__ import annotations

from pathlib import Path

import pytest

from jobs.measure_cost import main

CONFIG = ["--config", str(Path(__file__).resolve().parents[2] / "jobs" / "configs" / "smollm2_demo.yaml")]


def test_dry_run_refuses_a_target_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONFIG, f"target.path={tmp_path / 'nowhere'}", "--dry-run"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_impossible_sizes_are_a_wrong_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONFIG, "cost.max_tokens=0"]) == 2
    assert "cost.max_tokens" in capsys.readouterr().err
