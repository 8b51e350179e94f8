"""One Ray Train worker: the train function, from an assigned rank to checkpoints and the exported drafter."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cache_store.dataset import CacheBatch, TargetCacheStream, make_loader
from cache_store.mixture import SampleSet
from cache_store.packing import StreamConfig
from model.export import save_drafter
from model.family import AnyDrafter, drafter_loss, new_drafter
from model.losses import DrafterInputs, LossConfig, LossOutput
from model.target_heads import TargetHeads, load_target_heads
from model.warm_start import WarmStart, warm_start
from pipeline.atomic_file import write_atomically
from pipeline.engines.hf import resolve_target
from pipeline.train.checkpoint import (
    CheckpointState,
    check_recipe,
    complete_checkpoints,
    read_parameters,
    read_state,
    save_checkpoint,
    unchanged_tensors,
)
from pipeline.train.held_out import HeldOut
from pipeline.train.loop import Engine, LoopConfig, LoopParts, LoopResult, TrainingLoop
from pipeline.train.metrics import MetricsWriter
from pipeline.train.recipe import TrainingJob
from pipeline.train.schedule import lr_at
from pipeline.train.step_plan import AnchorRecipe, StepPlanner

if TYPE_CHECKING:
    from pipeline.train.engine import EngineConfig, TrainEngine

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EVENTS, WORKERS, SUMMARY, FAILURE = "events.jsonl", "workers.json", "summary.json", "failure.json"
DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the workers."""

    rank: int
    world_size: int
    device: torch.device

    def total(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks, float64; a collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks; a collective."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def train_worker(payload: dict[str, Any]) -> None:
    """Ray Train's entry: the process group exists already. `payload["job"]` is a TrainingJob."""
    import ray.train

    context = ray.train.get_context()
    # Workers of one machine share its cores; torch would start one thread per core in each of them.
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // context.get_local_world_size()))
    run_rank(payload["job"])


def run_rank(job: TrainingJob) -> LoopResult:
    """Train this rank's share, from the newest complete checkpoint to the end. Needs a torch.distributed group.

    Rank 0 writes everything that the run leaves in `job.output`.
    """
    from pipeline.train.engine import TrainEngine  # imports deepspeed

    training = job.training
    drafter = new_drafter(job.drafter).init_weights(training.seed)
    warm = None if training.init_from is None else warm_start(drafter, training.init_from)
    heads = load_target_heads(
        resolve_target(job.config.target), dtype=DTYPES[training.precision], draft_ids=job.draft_ids
    )
    engine = TrainEngine(drafter, functools.partial(_loss, heads, job.loss), _engine_config(job))
    heads.to(engine.device)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), engine.device)
    initial = engine.checksums()
    state = _resume(job, engine, ranks)
    _announce(job, ranks, state, warm)
    saver = _Saver(job, engine, ranks, initial)
    result = _loop(job, engine, ranks, state, saver)
    failures = [found for found in ranks.gather(result.failure) if found]
    if ranks.rank == 0:
        _finish(job, result, failures)
    dist.barrier()
    return result


def _loss(heads: TargetHeads, config: LossConfig, drafter: AnyDrafter, inputs: DrafterInputs) -> LossOutput:
    return drafter_loss(drafter, heads, inputs, config)


def _engine_config(job: TrainingJob) -> EngineConfig:
    from pipeline.train.engine import EngineConfig

    training = job.training
    return EngineConfig(
        precision=training.precision,
        zero_stage=training.zero_stage,
        micro_batch_size=training.micro_batch_size,
        gradient_clip=training.gradient_clip,
        betas=training.betas,
        weight_decay=training.weight_decay,
    )


def _stream_config(job: TrainingJob, rank: int, world_size: int, *, start_step: int) -> StreamConfig:
    training = job.training
    return StreamConfig(
        seed=training.seed,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        max_length=training.max_length,
        pack_tokens=training.max_length if training.data.pack else None,
        rank=rank,
        world_size=world_size,
        start_step=start_step,
        num_steps=job.total_steps,
    )


def _resume(job: TrainingJob, engine: TrainEngine, ranks: Ranks) -> CheckpointState:
    """Load the newest complete checkpoint into the engine; without one, the state of a fresh run.

    All ranks continue from the checkpoint that rank 0 chose.
    """
    chosen = None
    if ranks.rank == 0:
        found = complete_checkpoints(job.checkpoints, functools.partial(_event, job))
        chosen = found[0] if found else None
    path = ranks.gather(chosen)[0]
    if path is None:
        return CheckpointState(step=0, adam_step=0, skipped=0, world_size=0, recipe=job.recipe, unchanged=[])
    state = read_state(path)
    check_recipe(state.recipe, job.recipe, path)
    engine.restore(read_parameters(path), state.adam_step)
    return state


def _announce(job: TrainingJob, ranks: Ranks, state: CheckpointState, warm: WarmStart | None) -> None:
    workers = ranks.gather({"rank": ranks.rank, "host": socket.gethostname(), "pid": os.getpid()})
    if ranks.rank == 0:
        job.output.mkdir(parents=True, exist_ok=True)
        write_atomically(job.output / WORKERS, json.dumps(workers, indent=1) + "\n")
        before = f", the checkpoint was written by {state.world_size}" if state.world_size else ""
        if warm is not None and state.step == 0:
            _event(job, warm.text())
        _event(job, f"{ranks.world_size} workers start at step {state.step} of {job.total_steps}{before}")


def _event(job: TrainingJob, text: str) -> None:
    """A line for the person who watches: the driver prints what is appended here."""
    job.output.mkdir(parents=True, exist_ok=True)
    with (job.output / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": text}) + "\n")


class _Saver:
    """Gathers the engine's state on rank 0 and writes checkpoints."""

    def __init__(self, job: TrainingJob, engine: TrainEngine, ranks: Ranks, initial: dict[str, int]) -> None:
        self._job, self._engine, self._ranks, self._initial = job, engine, ranks, initial

    def save(self, step: int, skipped: int) -> float:
        """Write the checkpoint of a step; returns the share of trainable tensors still at their initial value."""
        parameters = {}
        for name, parameter in self._engine.state():
            if self._ranks.rank == 0:  # the others only take part in the gathering
                parameters[name] = parameter.to_cpu()
        if self._ranks.rank != 0:
            return 0.0
        state = CheckpointState(
            step=step,
            adam_step=self._engine.adam_step,
            skipped=skipped,
            world_size=self._ranks.world_size,
            recipe=self._job.recipe,
            unchanged=unchanged_tensors(self._initial, parameters),
        )
        save_checkpoint(self._job.checkpoints, state, parameters, keep=self._job.training.keep_checkpoints)
        return len(state.unchanged) / len(self._initial)


def _loop(job: TrainingJob, engine: TrainEngine, ranks: Ranks, state: CheckpointState, saver: _Saver) -> LoopResult:
    training = job.training
    stream = _stream_config(job, ranks.rank, ranks.world_size, start_step=state.step)
    config = LoopConfig(
        drafter=job.drafter,
        decay_gamma=job.loss.decay_gamma,
        total_steps=job.total_steps,
        start_step=state.step,
        start_skipped=state.skipped,
        samples_per_epoch=job.num_samples,
        global_batch_size=training.global_batch_size,
        checkpoint_every=training.checkpoint_every_steps,
        log_every=training.log_every_steps,
        world_size=ranks.world_size,
        device=ranks.device,
    )
    writer = MetricsWriter(job.output, start_step=state.step) if ranks.rank == 0 else None

    def log(step: int, values: dict[str, float]) -> None:
        if writer is not None:
            writer.write(step, values)

    parts = LoopParts(
        engine=engine,
        batches=_batches(job, stream, ranks),
        plan=_planner(job, stream).plan,
        sum_over_ranks=ranks.total,
        lr_at=functools.partial(lr_at, total=job.total_steps, peak=training.lr, warmup_ratio=training.warmup_ratio),
        save=saver.save,
        log=log,
        held_out=_held_out(job, stream, config, ranks),
    )
    try:
        return TrainingLoop(config, parts).run()
    finally:
        if writer is not None:
            writer.close()


def _batches(job: TrainingJob, config: StreamConfig, ranks: Ranks) -> Iterator[CacheBatch]:
    training = job.training
    loader = make_loader(
        TargetCacheStream(job.sources, config, verify=job.config.cache.verify),
        num_workers=training.loader_workers,
        prefetch=training.prefetch_batches,
        prefetch_bytes=training.prefetch_mb << 20,
        pin_memory=ranks.device.type == "cuda",
    )
    return iter(loader)


def _planner(job: TrainingJob, stream: StreamConfig) -> StepPlanner:
    return StepPlanner(SampleSet(job.sources, verify="never"), stream, _anchor_recipe(job))  # the index alone


def _anchor_recipe(job: TrainingJob) -> AnchorRecipe:
    return AnchorRecipe(drafter=job.drafter, num_anchors=job.training.num_anchors, decay_gamma=job.loss.decay_gamma)


def _held_out(
    job: TrainingJob, stream: StreamConfig, config: LoopConfig, ranks: Ranks
) -> Callable[[Engine], dict[str, float]] | None:
    if not job.held_out:
        return None
    samples = min(job.num_held_out, job.training.data.held_out_samples)
    one_step = dataclasses.replace(stream, global_batch_size=samples, start_step=0, num_steps=1)
    return HeldOut(job.held_out, one_step, _anchor_recipe(job), config, ranks.total, job.config.cache.verify).measure


def _finish(job: TrainingJob, result: LoopResult, failures: list[str]) -> None:
    """Rank 0: the exported drafter and a summary, or the failure in words."""
    if failures:
        # Named failures first: the ranks that only saw the others' have nothing to add.
        failures.sort(key=lambda text: "another rank" in text)
        write_atomically(job.output / FAILURE, json.dumps({"step": result.step, "failures": failures}) + "\n")
        return
    path = complete_checkpoints(job.checkpoints, functools.partial(_event, job))[0]
    state = read_state(path)
    export_drafter(job, path, state)
    summary = {"step": state.step, "skipped": state.skipped, "unchanged": state.unchanged}
    write_atomically(job.output / SUMMARY, json.dumps(summary, indent=1) + "\n")


def export_drafter(job: TrainingJob, checkpoint: Path, state: CheckpointState) -> None:
    """Write `<output>/drafter` from a checkpoint's float32 masters, in the run's precision."""
    heads = load_target_heads(resolve_target(job.config.target), dtype=None, draft_ids=job.draft_ids)
    provenance = {**job.provenance, "step": state.step}
    save_drafter(job.output / DRAFTER, drafter_of(job, checkpoint), provenance, heads=heads)


def drafter_of(job: TrainingJob, checkpoint: Path) -> AnyDrafter:
    """The drafter of a checkpoint in the run's precision, its draft vocabulary set."""
    drafter = new_drafter(job.drafter)
    masters = {name: parameter.master for name, parameter in read_parameters(checkpoint).items()}
    drafter.load_state_dict(masters)
    drafter.draft_ids = job.draft_ids
    return drafter.to(DTYPES[job.training.precision])
