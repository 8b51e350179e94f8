"""`make demo`: the main job on a real model, exactly by the commands that its users type, one after another."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.build import EXIT_COMPLETE_WITH_REJECTS
from pipeline.config import Config
from pipeline.demo_target import prepare_demo_target
from pipeline.errors import PipelineError
from pipeline.telemetry import format_duration


def demo_steps(config: Config, config_path: str, overrides: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """The demo's steps: (title, command). The commands are the public ones; nothing is private to the demo."""
    python, tools = sys.executable, Path(sys.executable).parent
    job = ["--config", config_path, *overrides]
    return [
        ("Build the Target Cache", [python, "jobs/build_cache.py", *job]),
        ("Look at it before paying for training", [str(tools / "cache_store"), "inspect", config.cache.url]),
        (
            "See what is supervised",
            [str(tools / "cache_store"), "sample", config.cache.url, "--n", "1", "--tokenizer", config.target.path],
        ),
        ("Train the drafter with DeepSpeed", [python, "jobs/train.py", *job]),
        ("Measure the accepted length", [python, "jobs/evaluate_drafter.py", *job]),
    ]


def run_demo(config: Config, config_path: str, overrides: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Prepare the target, run every step, and end by saying where the artefacts are. Returns an exit code.

    A dry run prints the commands. `overrides` are those that made `config` from the file; every job gets them too.

    Raises PipelineError naming the step whose command failed.
    """
    if dry_run:
        print("\n".join(f"{title}: {_shown(command)}" for title, command in demo_steps(config, config_path, overrides)))
        return 0
    started = time.monotonic()
    print(f"== Prepare the demo target in {config.target.path}", flush=True)
    prepare_demo_target(Path(config.target.path))
    for title, command in demo_steps(config, config_path, overrides):
        shown = _shown(command)
        print(f"\n== {title} [{format_duration(time.monotonic() - started)}]\n$ {shown}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code not in (0, EXIT_COMPLETE_WITH_REJECTS):
            raise PipelineError(f"{title}: `{shown}` ended with {code}; `make demo` again continues where it stopped")
    print(_closing(config, shlex.join([config_path, *overrides]), time.monotonic() - started), flush=True)
    return 0


def _shown(command: Sequence[str]) -> str:
    return shlex.join([Path(command[0]).name, *command[1:]])


def _closing(config: Config, config_path: str, seconds: float) -> str:
    run = Path(config.training.output)
    evaluation = config.evaluation.output or run / "evaluation"
    return f"""
== Done in {format_duration(seconds)}. What stands where:
  target       {config.target.path}
  Target Cache {config.cache.url}
  run          {run}  (metrics.jsonl, tensorboard/, checkpoints/)
  drafter      {run / "drafter"}  (config.json + model.safetensors)
  report       {evaluation}

Try next (with the environment's programs: source {Path(sys.executable).parent / "activate"}):
  open {Path(evaluation) / "report.html"} in a browser
  python jobs/calibrate_drafter.py --config {config_path}
  python jobs/export_drafter.py --config {config_path}
  python jobs/measure_cost.py --config {config_path} && python jobs/simulate_serving.py --config {config_path}
  cache_store verify {config.cache.url}
  cache_store stats {config.cache.url}
  tensorboard --logdir {run / "tensorboard"}
  python jobs/train.py --config {config_path} training.epochs=8 training.output={run}-longer
  python jobs/build_cache.py --config jobs/configs/qwen3_4b.yaml --dry-run"""
