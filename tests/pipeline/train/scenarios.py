"""What the spawned ranks run: several whole runs one after another in one process, because starting one is slow."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from model.target_heads import TargetHeads, load_target_heads
from pipeline.config import Config
from pipeline.train import worker
from pipeline.train.checkpoint import checksum, step_folder
from pipeline.train.loop import LoopResult
from pipeline.train.recipe import prepare_job
from pipeline.train.worker import run_rank


@dataclass(frozen=True)
class Continuation:
    """Start `config` from another run's checkpoint alone, as if that run had been killed after `step`."""

    source: Config
    step: int


def checkpoint_of(config: Config, step: int) -> Path:
    return step_folder(Path(config.training.output) / "checkpoints", step)


def train_all(configs: list[Config], origins: dict[int, Continuation] | None = None) -> list[LoopResult]:
    """Run each config on the ranks of this group; `origins[i]`: where config i continues."""
    results = []
    for number, config in enumerate(configs):
        origin = (origins or {}).get(number)
        if origin is not None and dist.get_rank() == 0:
            shutil.copytree(checkpoint_of(origin.source, origin.step), checkpoint_of(config, origin.step))
        dist.barrier()
        results.append(run_rank(prepare_job(config)))
    return results


def train_and_watch_heads(configs: list[Config]) -> list[tuple[list[int], list[int]]]:
    """Run each config; checksums of the frozen embedding and lm_head that it trained with, as loaded and at the end."""
    watched = []
    for config in configs:
        loaded: list[tuple[TargetHeads, list[int]]] = []

        def load(*args: Any, loaded: list[tuple[TargetHeads, list[int]]] = loaded, **kwargs: Any) -> TargetHeads:
            heads = load_target_heads(*args, **kwargs)
            loaded.append((heads, _checksums(heads)))
            return heads

        with mock.patch.object(worker, "load_target_heads", load):
            worker.run_rank(prepare_job(config))
        heads, before = loaded[0]  # the export reads them once more, in their stored dtype
        watched.append((before, _checksums(heads)))
    return watched


def _checksums(heads: TargetHeads) -> list[int]:
    return [checksum(buffer) for buffer in heads.buffers()]
