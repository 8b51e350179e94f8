"""A whole training run, from the driver: check, start the DeepSpeed workers under Ray Train, watch, report."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.atomic_file import write_atomically
from pipeline.cluster import ray_session, session_logs
from pipeline.config import Config, dump_config
from pipeline.errors import TrainingFailed
from pipeline.telemetry import Progress
from pipeline.train.checkpoint import check_recipe, complete_checkpoints, read_state
from pipeline.train.draft_vocab import FILE as DRAFT_VOCAB
from pipeline.train.metrics import METRICS, read_metrics
from pipeline.train.recipe import TrainingJob, prepare_job
from pipeline.train.worker import DRAFTER, EVENTS, FAILURE, SUMMARY, train_worker

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a finished run left behind."""

    steps: int
    skipped: int
    """Steps without any supervised slot."""
    unchanged: tuple[str, ...]
    """Trainable tensors that never moved."""
    metrics: dict[str, Any]
    """The last record of metrics.jsonl."""
    output: Path
    already_finished: bool

    @property
    def drafter(self) -> Path:
        """The exported drafter."""
        return self.output / DRAFTER

    def text(self) -> str:
        """What the job prints at its end."""
        first = "was finished already, nothing to do" if self.already_finished else "finished"
        tau, loss = self.metrics.get("tau"), self.metrics.get("loss")
        measured = f"expected accepted length {tau:.3f} (loss {loss:.4f})" if tau and loss else "no metrics were logged"
        notes = []
        held_out = self.metrics.get("held_out_tau"), self.metrics.get("held_out_loss")
        if held_out[0] and held_out[1]:
            notes.append(f"  held out    expected accepted length {held_out[0]:.3f} (loss {held_out[1]:.4f})")
        if self.skipped:
            notes.append(f"  skipped     {self.skipped} steps had no supervised token")
        if self.unchanged:
            notes.append(f"  warning     {len(self.unchanged)} tensors never moved: {', '.join(self.unchanged)}")
        return "\n".join(
            [
                f"Training {first}: {self.steps} steps, {measured} on the last logged training batches",
                *notes,
                f"  drafter     {self.drafter}",
                f"  metrics     {self.output / METRICS}, {self.output / 'tensorboard'}",
                f"  checkpoints {self.output / 'checkpoints'}",
                "Next: python jobs/evaluate_drafter.py --config <the same config>",
            ]
        )


def run_training(config: Config) -> TrainReport:
    """Train `config.drafter` on `config.cache`, continuing from the newest complete checkpoint in the output folder.

    Raises ConfigError before any worker starts when config, target, cache or an earlier checkpoint disagree, and
    TrainingFailed when training stops: the same command then continues.
    """
    job = prepare_job(config)
    job.output.mkdir(parents=True, exist_ok=True)
    done = _steps_done(job)
    if done == job.total_steps and (job.output / SUMMARY).is_file() and (job.output / DRAFTER).is_dir():
        return _report(job, already_finished=True)
    _describe_run(job, config)
    for name in (FAILURE, SUMMARY, EVENTS):
        (job.output / name).unlink(missing_ok=True)
    with ray_session(config.cluster), _watch(job, done):
        _fit(job)
    _raise_failure(job)
    return _report(job, already_finished=False)


def describe(job: TrainingJob) -> str:
    """The run in a few lines, for --dry-run."""
    training = job.training
    return "\n".join(
        [
            f"train       {job.total_steps} steps of {training.global_batch_size} samples: {training.epochs:g} epochs "
            f"of {job.num_samples} samples",
            *(f"data        {line}" for line in job.data),
            f"workers     {training.num_workers}, {training.precision}, ZeRO {training.zero_stage}, "
            f"{training.gpus_per_worker:g} GPUs each",
            f"drafter     {job.drafter.kind}, {job.drafter.num_draft_layers} layers, hidden {job.drafter.hidden_size}, "
            f"block {job.drafter.block_size}, layers {list(job.drafter.target_layer_ids)} of the target",
            *([f"vocabulary  {job.draft_vocab.line()}"] if job.draft_vocab else []),
            *([f"start       {training.init_from}"] if training.init_from else []),
            f"output      {job.output} ({_steps_done(job)} steps done)",
        ]
    )


def _steps_done(job: TrainingJob) -> int:
    """Steps of the newest complete checkpoint; raises ConfigError when it belongs to another recipe."""
    found = complete_checkpoints(job.checkpoints, lambda line: None)
    if not found:
        return 0
    state = read_state(found[0])
    check_recipe(state.recipe, job.recipe, found[0])
    return state.step


def _describe_run(job: TrainingJob, config: Config) -> None:
    write_atomically(job.output / "config.yaml", dump_config(config))
    if job.draft_vocab is not None:
        write_atomically(job.output / DRAFT_VOCAB, job.draft_vocab.to_json())
    about = {"argv": sys.argv, "git_sha": _git_sha(), "python": sys.version.split()[0], "started": time.time()}
    write_atomically(job.output / "run.json", json.dumps({**about, **job.provenance}, indent=1) + "\n")


def _git_sha() -> str | None:
    """The commit of this source tree, with `+` when it has changes; None outside a repository."""
    folder = Path(__file__).parent
    try:
        sha = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=folder, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha + ("+" if changed else "")


def _fit(job: TrainingJob) -> None:
    from ray.train import TrainingFailedError

    try:
        _trainer(job).fit()
    except TrainingFailedError as error:
        raise TrainingFailed(
            f"the workers failed more than training.max_failures = {job.training.max_failures} times; last: "
            f"{_cause(error)}; their logs: {session_logs()}; the last complete checkpoint is kept and the same "
            "command continues from it"
        ) from error


def _trainer(job: TrainingJob) -> TorchTrainer:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    training = job.training
    on_gpu = training.gpus_per_worker > 0
    resources: dict[str, float] = {"CPU": training.cpus_per_worker}
    if on_gpu:
        resources["GPU"] = training.gpus_per_worker
    # DeepSpeed picks its accelerator on import, by this variable alone.
    environment = {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    return TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=training.num_workers, use_gpu=on_gpu, resources_per_worker=resources),
        run_config=RunConfig(
            name="ray",
            storage_path=str(job.output),
            failure_config=FailureConfig(max_failures=training.max_failures),
            worker_runtime_env={"env_vars": environment},  # type: ignore[call-arg]  # typed as the old class
        ),
    )


def _cause(error: BaseException) -> str:
    """The first worker's own exception in one line."""
    failures = getattr(error, "worker_failures", {})
    inner: BaseException = failures[min(failures)] if failures else error
    while (deeper := getattr(inner, "cause", None) or inner.__cause__) is not None and deeper is not inner:
        inner = deeper
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[-1] if lines else ''}"


def _raise_failure(job: TrainingJob) -> None:
    path = job.output / FAILURE
    if path.is_file():
        failures = json.loads(path.read_text(encoding="utf-8"))["failures"]
        raise TrainingFailed(
            f"{failures[0]}; the last complete checkpoint before it is kept in {job.checkpoints} "
            f"({_steps_done(job)} steps); to train without a sample, list it with 'cache_store repair <its cache> "
            "--exclude --sample <id>'"
        )
    if not (job.output / SUMMARY).is_file():
        raise TrainingFailed(f"the workers ended without a summary in {job.output}; is it a folder they all share?")


def _report(job: TrainingJob, *, already_finished: bool) -> TrainReport:
    summary = json.loads((job.output / SUMMARY).read_text(encoding="utf-8"))
    records = read_metrics(job.output / METRICS)
    return TrainReport(
        steps=summary["step"],
        skipped=summary["skipped"],
        unchanged=tuple(summary["unchanged"]),
        metrics=records[-1] if records else {},
        output=job.output,
        already_finished=already_finished,
    )


@contextlib.contextmanager
def _watch(job: TrainingJob, done: int) -> Iterator[None]:
    """Print the workers' events and progress while the body runs; they reach us through the output folder."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(job, done, stop), daemon=True, name="train-progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(job: TrainingJob, done: int, stop: threading.Event) -> None:
    progress = Progress("train", job.total_steps, unit="steps", already=done)
    events, detail, last = 0, "", False
    while not last:
        last = stop.wait(_POLL_S)
        lines = read_metrics(job.output / EVENTS)
        for line in lines[events:]:
            print(f"train        {line['event']}", flush=True)  # noqa: T201  progress is this thread's purpose
        events = len(lines)
        for record in read_metrics(job.output / METRICS):
            if record["step"] > progress.done:
                detail = _detail(record)
                progress.update(record["step"] - progress.done, detail=detail)
    progress.finish(detail)


def _detail(record: dict[str, Any]) -> str:
    shown = (("loss", ".4f"), ("tau", ".3f"), ("lr", ".2e"), ("grad_norm", ".2f"), ("data_wait_share", ".0%"))
    return ", ".join(f"{name} {record[name]:{form}}" for name, form in shown if record.get(name) is not None)
