from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_store.dataset import CacheBatch
from model.config import DrafterConfig
from model.losses import DrafterInputs, LossOutput
from pipeline.train.loop import LoopConfig, LoopParts, TrainingLoop
from pipeline.train.step_plan import StepPlan

DRAFTER = DrafterConfig(
    hidden_size=4,
    intermediate_size=8,
    num_draft_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=11,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
    target_layer_ids=(0,),
    num_target_layers=3,
    block_size=2,
    mask_token_id=10,
    markov_head_type="none",
    markov_rank=0,
    enable_confidence_head=False,
    confidence_head_with_markov=False,
    sample_from_anchor=True,
)
CONFIG = LoopConfig(
    drafter=DRAFTER,
    decay_gamma=4.0,
    total_steps=6,
    start_step=0,
    start_skipped=0,
    samples_per_epoch=8,
    global_batch_size=4,
    checkpoint_every=4,
    log_every=3,
    world_size=3,
    device=torch.device("cpu"),
)
ANCHORS = np.array([2, 3], dtype=np.int64)


class FakeEngine:
    """Losses are the micro-batch's number of blocks times a trainable 1.0; gradients are not looked at."""

    def __init__(self, bad_position: int | None = None, bad_norm_at: int | None = None) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.bad_position, self.bad_norm_at = bad_position, bad_norm_at
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.boundaries: list[bool] = []
        self.seen_silent = 0

    def forward(self, inputs: DrafterInputs) -> LossOutput:
        count = float(inputs.blocks.weights.sum())
        self.seen_silent += count == 0
        total = self.weight * count
        if self.bad_position is not None and (inputs.hidden_states_BTC == self.bad_position).any():
            total = total * float("nan")
        return LossOutput(
            total=total,
            weight=torch.tensor(count),
            metrics={"loss/num": total.detach(), "loss/den": torch.tensor(count or 1.0), "ce_loss/num": total.detach()}
            | {"ce_loss/den": torch.tensor(1.0)},
        )

    evaluate = forward

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.losses.append(float(loss.detach()))
        self.boundaries.append(last)

    def step(self, lr: float) -> float:
        self.rates.append(lr)
        return float("inf") if len(self.rates) - 1 == self.bad_norm_at else 1.5


def batch_at(step: int, micro: int, size: int = 2, micro_batches: int = 2) -> CacheBatch:
    """Samples whose states are filled with their own position + 1."""
    positions = torch.arange(size) + 10 * step + 2 * micro
    mask = torch.zeros(size, 6, dtype=torch.bool)
    mask[:, 2:] = True
    hidden = (positions + 1).to(torch.bfloat16)[:, None, None].expand(size, 6, 4).clone()
    return CacheBatch(
        step=step,
        micro_index=micro,
        micro_batches=micro_batches,
        sample_ids=[f"s{position}" for position in positions.tolist()],
        epochs=torch.zeros(size, dtype=torch.int64),
        positions=positions,
        rows=torch.arange(size),
        starts=torch.zeros(size, dtype=torch.int64),
        lengths=torch.full((size,), 6),
        input_ids=torch.zeros(size, 6, dtype=torch.int64),
        loss_mask=mask,
        documents=torch.arange(size)[:, None].expand(size, 6).clone(),
        hidden_states=hidden,
        last_hidden_state=torch.zeros(size, 6, 4, dtype=torch.bfloat16),
    )


class Rig:
    """A loop over fakes; `weightless`: steps without any supervised slot; `other_ranks_fail_at`: a step; `counts`:
    micro-batches of a step, where not 2."""

    def __init__(self, config: LoopConfig = CONFIG, engine: FakeEngine | None = None, **settings: Any) -> None:
        self.config, self.engine = config, engine or FakeEngine()
        self.weightless: set[int] = settings.get("weightless", set())
        self.silent: set[int] = settings.get("silent", set())
        self.other_ranks_fail_at: int | None = settings.get("other_ranks_fail_at")
        self.counts: dict[int, int] = settings.get("counts", {})
        self.held_out: Any = None
        self.saved: list[tuple[int, int]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.read: list[tuple[int, int]] = []
        self.step = 0

    def batches(self) -> Iterator[CacheBatch]:
        for step in range(self.config.start_step, self.config.total_steps):
            for micro in range(self.micro_batches(step)):
                self.read.append((step, micro))
                yield batch_at(step, micro, micro_batches=self.micro_batches(step))

    def micro_batches(self, step: int) -> int:
        return self.counts.get(step, 2)

    def plan(self, step: int) -> StepPlan:
        self.step = step
        drawn = ANCHORS[:0] if step in self.silent | self.weightless else ANCHORS
        count = self.micro_batches(step)
        keys = [(0, int(p)) for micro in range(count) for p in batch_at(step, micro).positions]
        return StepPlan(dict.fromkeys(keys, drawn), 0.0 if step in self.weightless else 5.0, count)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Three ranks, all alike."""
        if len(values) == 1 and values[0] == 0.0 and self.other_ranks_fail_at == self.step:
            return [1.0]
        return [3 * value for value in values]

    def run(self) -> Any:
        parts = LoopParts(
            engine=self.engine,
            batches=self.batches(),
            plan=self.plan,
            sum_over_ranks=self.sum_over_ranks,
            lr_at=lambda step: 0.1 * (step + 1),
            save=lambda step, skipped: self.saved.append((step, skipped)) or 0.25,  # type: ignore[func-returns-value]
            log=lambda step, values: self.logged.append((step, values)),
            held_out=self.held_out,
        )
        return TrainingLoop(self.config, parts).run()


def test_loss_is_scaled_to_the_global_weight() -> None:
    rig = Rig()
    rig.run()
    # Two samples, two anchors each; the block at 3 has two labels, the one at 2 too: weight 1 + exp(-1/4) a block.
    local = 4 * (1 + np.exp(-0.25))
    assert rig.engine.losses == pytest.approx([local * 3 / 15.0] * 12)
    assert rig.engine.boundaries == [False, True] * 6


def test_steps_may_have_different_numbers_of_micro_batches() -> None:
    rig = Rig(counts={0: 1, 3: 4})
    rig.run()
    counts = [1, 2, 2, 4, 2, 2]
    assert rig.engine.boundaries == [micro + 1 == count for count in counts for micro in range(count)]
    assert len(rig.engine.rates) == 6
    assert rig.read == [(step, micro) for step, count in enumerate(counts) for micro in range(count)]


def test_schedule_of_updates_logs_and_checkpoints() -> None:
    rig = Rig()
    result = rig.run()
    assert (result.step, result.skipped, result.failure) == (6, 0, None)
    assert rig.engine.rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert rig.saved == [(4, 0), (6, 0)]
    assert [step for step, _ in rig.logged] == [3, 6]
    first, last = rig.logged[0][1], rig.logged[1][1]
    assert first["lr"] == pytest.approx(0.3)
    assert first["loss"] == pytest.approx(1.0)
    assert first["epoch"] == pytest.approx(1.5)
    assert "unchanged_tensors_share" not in first
    assert last["unchanged_tensors_share"] == 0.25
    assert 0.0 <= last["data_wait_share"] <= 1.0
    assert last["tokens_per_s"] == pytest.approx(6 * last["samples_per_s"])


def test_resumed_loop_reads_and_updates_only_what_is_left() -> None:
    rig = Rig(replace(CONFIG, start_step=4, start_skipped=1))
    result = rig.run()
    assert rig.read == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert rig.engine.rates == pytest.approx([0.5, 0.6])
    assert result.skipped == 1


def test_step_without_supervision_is_skipped_and_counted() -> None:
    rig = Rig(weightless={1, 4})
    result = rig.run()
    assert result.skipped == 2
    assert len(rig.engine.losses) == 8
    assert rig.engine.rates == pytest.approx([0.1, 0.3, 0.4, 0.6])  # the schedule does not wait
    assert len(rig.read) == 12
    assert rig.saved[-1] == (6, 2)
    assert rig.logged[-1][1]["skipped_steps"] == 2.0


def test_rank_without_anchors_still_takes_part_in_every_collective() -> None:
    rig = Rig(silent={0, 1, 2})
    rig.run()
    assert rig.engine.seen_silent == 6
    assert rig.engine.losses[:6] == [0.0] * 6
    assert len(rig.engine.losses) == 12
    assert rig.logged[0][1]["loss"] == 0.0  # nothing but made-up blocks: they are in no metric


def test_non_finite_loss_names_step_sample_and_term_after_the_collectives() -> None:
    rig = Rig(engine=FakeEngine(bad_position=24))  # position 23: step 2, second micro-batch
    result = rig.run()
    assert result.step == 2
    assert result.failure.startswith("step 2: the loss is nan; samples: s23 (its input is finite; terms ce_loss")
    assert "s22" not in result.failure
    assert len(rig.engine.losses) == 6  # the other ranks wait in the reduction of this step
    assert rig.saved == []


def test_non_finite_gradient_norm_names_the_samples_of_the_step() -> None:
    result = Rig(engine=FakeEngine(bad_norm_at=1)).run()
    assert result.step == 1
    assert "gradient norm is inf" in result.failure
    assert "s10, s11, s12, s13" in result.failure


def test_failure_of_another_rank_stops_this_one_at_the_same_step() -> None:
    rig = Rig(other_ranks_fail_at=3)
    result = rig.run()
    assert result.step == 3
    assert "another rank" in result.failure
    assert rig.saved == []


def test_held_out_samples_are_measured_with_every_checkpoint() -> None:
    measured: list[int] = []
    rig = Rig()

    def held_out(engine: Any) -> dict[str, float]:
        measured.append(len(engine.rates))
        return {"held_out_loss": float(len(measured))}

    rig.held_out = held_out
    rig.run()
    assert measured == [4, 6]
    assert "held_out_loss" not in rig.logged[0][1]
    assert rig.logged[1][1]["held_out_loss"] == 2.0
