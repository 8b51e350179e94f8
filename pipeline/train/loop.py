"""The optimizer-step loop: batches in, updates out. It knows neither Ray nor DeepSpeed, only what it is handed.

Per step every rank runs the same number of micro-batches. The loss handed to the engine is
local Σw·loss · ranks / global Σw, so after the engine's own averaging the gradient is exactly that of
(global weighted sum / global weight), whatever the split (design.md §5.5).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cache_store.dataset import CacheBatch
from model.anchors import Documents, build_blocks
from model.config import DrafterConfig
from model.losses import DrafterInputs, LossOutput, metric_values
from pipeline.train.diagnosis import describe_loss
from pipeline.train.step_plan import StepPlan


class Engine(Protocol):
    """What the loop needs of pipeline.train.engine.TrainEngine."""

    def forward(self, inputs: DrafterInputs) -> LossOutput:
        """Objective of a micro-batch."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate gradients; `last` of the step."""

    def step(self, lr: float) -> float:
        """Update; returns the global gradient norm."""

    def evaluate(self, inputs: DrafterInputs) -> LossOutput:
        """The objective without gradients; no collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """The shape of the run."""

    drafter: DrafterConfig
    decay_gamma: float
    total_steps: int
    start_step: int
    """Steps done by earlier runs."""
    start_skipped: int
    """Steps skipped by earlier runs."""
    samples_per_epoch: int
    global_batch_size: int
    checkpoint_every: int
    log_every: int
    world_size: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """The collaborators."""

    engine: Engine
    batches: Iterator[CacheBatch]
    plan: Callable[[int], StepPlan]
    sum_over_ranks: Callable[[Sequence[float]], list[float]]
    """Sums float64 numbers over the ranks; a collective."""
    lr_at: Callable[[int], float]
    save: Callable[[int, int], float]
    """(steps done, steps skipped) -> share of trainable tensors unchanged since step 0; a collective."""
    log: Callable[[int, dict[str, float]], None]
    """(steps done, values); called on every rank with the same values."""
    held_out: Callable[[Engine], dict[str, float]] | None = None
    """Metrics on held-out samples, taken with every checkpoint; a collective."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """How the loop ended."""

    step: int
    skipped: int
    failure: str | None
    """This rank's view of a non-finite loss or gradient; the other ranks stopped at the same step."""
    last: dict[str, float]
    """The last logged values."""


class _Interval:
    """Sums since the last log record: metrics stay on the device, and are reduced over the ranks once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: Tensor | None = None
        self.samples = self.tokens = 0
        self.wait = 0.0
        self.started = time.perf_counter()

    def add(self, batch: CacheBatch, metrics: dict[str, Tensor], *, silent: bool) -> None:
        """`silent`: the block was made up, so only the metrics' names count."""
        self.samples += len(batch.sample_ids)
        self.tokens += int(batch.lengths.sum())
        self.names = sorted(metrics)
        values = torch.stack([metrics[name].detach() for name in self.names]).double()
        values = torch.zeros_like(values) if silent else values
        self.sums = values if self.sums is None else self.sums + values

    def reduce(self, sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        own = [self.samples, self.tokens, self.wait, seconds]
        sums = [] if self.sums is None else self.sums.tolist()
        samples, tokens, wait, all_seconds, *totals = sum_over_ranks([*own, *sums])
        return {
            **metric_values(dict(zip(self.names, totals, strict=True))),
            "samples_per_s": samples / seconds,
            "tokens_per_s": tokens / seconds,
            "data_wait_share": wait / all_seconds,
        }


class TrainingLoop:
    """Runs the steps start_step .. total_steps-1."""

    def __init__(self, config: LoopConfig, parts: LoopParts) -> None:
        self._config, self._parts = config, parts
        self._skipped = config.start_skipped
        self._norm = 0.0
        self._unchanged: float | None = None
        self._held_out: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._interval = _Interval()

    def run(self) -> LoopResult:
        """Train to the end, or to the first step with a non-finite loss or gradient, on all ranks alike."""
        config = self._config
        for step in range(config.start_step, config.total_steps):
            failure, failed = self._step(step)
            if failed:
                elsewhere = f"step {step}: another rank met a non-finite loss or gradient"
                return LoopResult(step, self._skipped, failure or elsewhere, self._last)
            done, last = step + 1, step + 1 == config.total_steps
            if last or done % config.checkpoint_every == 0:
                self._unchanged = self._parts.save(done, self._skipped)
                self._measure_held_out()
            if last or done % config.log_every == 0:
                self._log(done)
        return LoopResult(config.total_steps, self._skipped, None, self._last)

    def _measure_held_out(self) -> None:
        if self._parts.held_out is None:
            return
        started = time.perf_counter()
        self._held_out = self._parts.held_out(self._parts.engine)
        self._interval.started += time.perf_counter() - started  # no time of training

    def _step(self, step: int) -> tuple[str | None, bool]:
        """One optimizer step: (this rank's failure, whether any rank failed)."""
        plan = self._parts.plan(step)
        (weight,) = self._parts.sum_over_ranks([plan.weight])
        failure, sample_ids = None, []
        for _ in range(plan.micro_batches):
            batch = self._next_batch(step)
            if weight == 0.0:
                continue
            sample_ids += batch.sample_ids
            found = self._micro_batch(batch, plan, weight)
            failure = failure or found
        if weight == 0.0:
            self._skipped += 1
            return None, False
        self._norm = self._parts.engine.step(self._parts.lr_at(step))
        if failure is None and not math.isfinite(self._norm):
            failure = (
                f"step {step}: the gradient norm is {self._norm} although this rank's losses are finite; "
                f"samples of this rank: {', '.join(sample_ids)}"
            )
        (failures,) = self._parts.sum_over_ranks([0.0 if failure is None else 1.0])
        return failure, failures > 0

    def _next_batch(self, step: int) -> CacheBatch:
        started = time.perf_counter()
        batch = next(self._parts.batches)
        self._interval.wait += time.perf_counter() - started
        assert batch.step == step, f"the loader is at step {batch.step}, the loop at {step}"
        return batch

    def _micro_batch(self, batch: CacheBatch, plan: StepPlan, weight: float) -> str | None:
        config, engine = self._config, self._parts.engine
        keys = zip(batch.epochs.tolist(), batch.positions.tolist(), strict=True)
        anchors = [plan.anchors[key] for key in keys]
        inputs = make_inputs(batch, anchors, config)
        output = engine.forward(inputs)
        self._interval.add(batch, output.metrics, silent=not any(len(drawn) for drawn in anchors))
        failure = None
        if not math.isfinite(float(output.total.detach())):
            failure = describe_loss(batch, inputs, output, engine.evaluate)
        # Also after a failure: the other ranks wait in this step's collectives.
        engine.backward(output.total * (config.world_size / weight), last=batch.micro_index + 1 == plan.micro_batches)
        return failure

    def _log(self, done: int) -> None:
        config = self._config
        values = self._interval.reduce(self._parts.sum_over_ranks)
        values |= {
            "epoch": done * config.global_batch_size / config.samples_per_epoch,
            "lr": self._parts.lr_at(done - 1),
            "grad_norm": self._norm,
            "skipped_steps": float(self._skipped),
            **self._held_out,
        }
        if self._unchanged is not None:
            values["unchanged_tensors_share"] = self._unchanged
        self._interval, self._last = _Interval(), values
        self._parts.log(done, values)


def make_inputs(batch: CacheBatch, anchors: Sequence[np.ndarray], config: LoopConfig) -> DrafterInputs:
    """A micro-batch on the device; `anchors[n]` are those of document n. Without any anchor: `silent_inputs`."""
    if not any(len(drawn) for drawn in anchors):
        return silent_inputs(batch, config)
    documents = Documents(batch.rows.numpy(), batch.starts.numpy(), batch.lengths.numpy())
    blocks = build_blocks(batch.input_ids, batch.loss_mask, anchors, config.drafter, config.decay_gamma, documents)
    return DrafterInputs(
        hidden_states_BTC=batch.hidden_states.to(config.device, non_blocking=True),
        last_hidden_BTD=batch.last_hidden_state.to(config.device, non_blocking=True),
        blocks=blocks.to(config.device),
        input_ids_BT=batch.input_ids.to(config.device, non_blocking=True),
    )


def silent_inputs(batch: CacheBatch, config: LoopConfig) -> DrafterInputs:
    """One made-up block of weight 0, for a rank without anchors: loss 0, every gradient exactly 0.

    ZeRO 2 reduces gradients by their place in a bucket, in the order in which backward finishes them, so all ranks
    must run the same graph. A loss of another shape, for instance a bare zero, mixes up the parameters' gradients.
    """
    ids_BT = torch.zeros(1, 3, dtype=torch.int64)
    blocks = build_blocks(ids_BT, ids_BT == 0, [np.ones(1, np.int64)], config.drafter, config.decay_gamma)
    silent = dataclasses.replace(
        blocks, supervised=torch.zeros_like(blocks.supervised), weights=torch.zeros_like(blocks.weights)
    )
    return DrafterInputs(
        hidden_states_BTC=batch.hidden_states.new_zeros(1, 3, batch.hidden_states.shape[-1]).to(config.device),
        last_hidden_BTD=batch.last_hidden_state.new_zeros(1, 3, batch.last_hidden_state.shape[-1]).to(config.device),
        blocks=silent.to(config.device),
        input_ids_BT=ids_BT.to(config.device),
    )
