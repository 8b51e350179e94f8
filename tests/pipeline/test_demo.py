from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.demo import main
from pipeline import demo
from pipeline.build import EXIT_COMPLETE_WITH_REJECTS
from pipeline.config import load_config
from pipeline.errors import PipelineError

ROOT = Path(__file__).resolve().parents[2]
PATH = str(ROOT / "jobs" / "configs" / "smollm2_demo.yaml")
CONFIG = load_config(PATH)


def _run(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> list[list[str]]:
    ran: list[list[str]] = []

    def fake(command: list[str], *, check: bool) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=codes[len(ran) - 1])

    monkeypatch.setattr(demo, "prepare_demo_target", lambda path: path)
    monkeypatch.setattr(subprocess, "run", fake)
    return ran


def test_every_step_is_a_public_command() -> None:
    for _, command in demo.demo_steps(CONFIG, PATH):
        script = Path(command[1])
        assert Path(command[0]).name == "cache_store" or (script.parts[0] == "jobs" and (ROOT / script).is_file())


def test_steps_run_in_order_and_the_end_names_artefacts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = _run(monkeypatch, [EXIT_COMPLETE_WITH_REJECTS, 0, 0, 0, 0])
    assert demo.run_demo(CONFIG, PATH) == 0
    assert [Path(command[1]).stem for command in ran] == [
        "build_cache",
        "inspect",
        "sample",
        "train",
        "evaluate_drafter",
    ]
    out = capsys.readouterr().out
    for expected in ("build/demo/cache", "build/demo/run/drafter", "Try next"):
        assert expected in out


def test_overrides_reach_every_job_and_a_dry_run_only_shows_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = _run(monkeypatch, [0] * 5)
    arguments = ["--config", PATH, "training.output=elsewhere", "training.epochs=1"]
    assert main([*arguments, "--dry-run"]) == 0
    assert ran == []
    assert capsys.readouterr().out.count("training.output=elsewhere training.epochs=1") == 3
    assert main(arguments) == 0
    jobs = [command for command in ran if command[1].startswith("jobs/")]
    assert [command[2:] for command in jobs] == [arguments] * 3


def test_a_failed_step_stops_the_demo_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _run(monkeypatch, [0, 0, 0, 1])
    with pytest.raises(PipelineError, match=r"Train the drafter.*ended with 1.*again continues"):
        demo.run_demo(CONFIG, PATH)
    assert len(ran) == 4
