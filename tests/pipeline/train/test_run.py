from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model.export import load_drafter
from pipeline.config import Config, dump_config
from pipeline.errors import ConfigError, TrainingFailed
from pipeline.train import run
from pipeline.train.checkpoint import CheckpointState, ParameterState, save_checkpoint
from pipeline.train.metrics import read_metrics
from pipeline.train.recipe import prepare_job
from tests.pipeline.train.rig import make_cache, make_config, make_target, mixed_masks

ROOT = Path(__file__).resolve().parents[3]
KILL_AFTER_STEP = 40


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    make_target(tmp_path / "target")
    make_cache(str(tmp_path / "cache"), mixed_masks(16))
    return tmp_path


def pretend_checkpoint(config: Config, step: int) -> None:
    job = prepare_job(config)
    state = CheckpointState(step=step, adam_step=step, skipped=2, world_size=2, recipe=job.recipe, unchanged=[])
    save_checkpoint(job.checkpoints, state, {"w": ParameterState(*[torch.zeros(2)] * 3)}, keep=1)


def refuse_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(job: object) -> None:
        raise AssertionError("no worker may start")

    monkeypatch.setattr(run, "_fit", started)


def test_finished_run_says_so_and_does_nothing(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ray(monkeypatch)
    config = make_config(toy)
    pretend_checkpoint(config, 6)
    (toy / "run" / "drafter").mkdir()
    (toy / "run" / "summary.json").write_text(json.dumps({"step": 6, "skipped": 2, "unchanged": ["norm.weight"]}))
    (toy / "run" / "metrics.jsonl").write_text(json.dumps({"step": 6, "tau": 1.75, "loss": 2.5}) + "\n")
    report = run.run_training(config)
    assert report.already_finished
    text = report.text()
    assert "finished already" in text
    assert "6 steps, expected accepted length 1.750 (loss 2.5000)" in text
    assert "2 steps had no supervised token" in text
    assert "1 tensors never moved: norm.weight" in text
    assert str(toy / "run" / "drafter") in text


def test_another_recipe_is_refused_before_a_worker_starts(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_ray(monkeypatch)
    pretend_checkpoint(make_config(toy), 3)
    with pytest.raises(ConfigError, match=r"training\.lr was 0\.01, now 0\.02"):
        run.run_training(make_config(toy, lr=2e-2))


def test_description_counts_what_is_left(toy: Path) -> None:
    config = make_config(toy)
    assert "6 steps of 8 samples: 3 epochs of 16 samples" in run.describe(prepare_job(config))
    pretend_checkpoint(config, 3)
    assert "(3 steps done)" in run.describe(prepare_job(config))


def test_failure_of_the_workers_is_one_line(toy: Path) -> None:
    config = make_config(toy)
    pretend_checkpoint(config, 3)
    (toy / "run" / "failure.json").write_text(json.dumps({"step": 4, "failures": ["step 4: the loss is nan; s01"]}))
    with pytest.raises(TrainingFailed, match=r"step 4: the loss is nan; s01; the last complete .* \(3 steps\)"):
        run._raise_failure(prepare_job(config))


def start_job(config: Config, folder: Path) -> subprocess.Popen[str]:
    """`python jobs/train.py` as a user types it."""
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "jobs/train.py", "--config", str(path)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if any(record["step"] >= step for record in read_metrics(output / "metrics.jsonl")):
            return
        time.sleep(0.1)
    pytest.fail(f"the run never came to step {step}: {process.communicate(timeout=60)[0]}")


@pytest.mark.slow
def test_killed_worker_is_restarted_and_the_run_is_the_same(toy: Path) -> None:
    """kill -9 of one of two real Ray Train workers: same steps, same numbers as a run that nobody killed."""
    settings = {"epochs": 75, "checkpoint_every_steps": 15, "lr": 1e-3, "precision": "bf16"}
    outputs = [toy / "quiet", toy / "killed"]
    for output in outputs:
        process = start_job(make_config(toy, output=output.name, **settings), toy)
        if output.name == "killed":
            wait_for_step(output, KILL_AFTER_STEP, process)
            workers = json.loads((output / "workers.json").read_text())
            os.kill(workers[1]["pid"], signal.SIGKILL)
        text = process.communicate(timeout=400)[0]
        assert process.returncode == 0, text
        assert "Training finished: 150 steps" in text
    quiet, killed = (read_metrics(output / "metrics.jsonl") for output in outputs)
    assert [record["step"] for record in killed] == list(range(1, 151))
    assert [record["loss"] for record in killed] == pytest.approx([record["loss"] for record in quiet], rel=1e-6)
    events = [line["event"] for line in read_metrics(outputs[1] / "events.jsonl")]
    starts = [event for event in events if "workers start at step" in event]
    assert len(starts) == 2
    assert "start at step 0 " not in starts[1]
    one, two = (load_drafter(output / "drafter") for output in outputs)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)
    again = start_job(make_config(toy, output="killed", **settings), toy)
    assert "finished already" in again.communicate(timeout=120)[0]


@pytest.mark.slow
def test_poisoned_run_is_not_retried(tmp_path: Path) -> None:
    """The same sample would fail again: the workers are started once, and one line names the sample."""
    make_target(tmp_path / "target")
    make_cache(str(tmp_path / "cache"), mixed_masks(16), huge_sample=5)
    process = start_job(make_config(tmp_path, checkpoint_every_steps=1), tmp_path)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert "TrainingFailed: step" in text
    assert "s05" in text
    assert text.count("workers start at step") == 1
