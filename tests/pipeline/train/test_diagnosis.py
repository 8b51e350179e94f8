from __future__ import annotations

import dataclasses

import torch

from cache_store.dataset import CacheBatch
from model.losses import DrafterInputs, LossOutput
from pipeline.train.diagnosis import describe_loss
from pipeline.train.loop import make_inputs
from tests.pipeline.train.test_loop import ANCHORS, CONFIG, batch_at


def total_of_states(inputs: DrafterInputs) -> LossOutput:
    """Non-finite exactly when a state is."""
    total = inputs.hidden_states_BTC.float().sum() + inputs.last_hidden_BTD.float().sum()
    metrics = {"ce_loss/num": total, "l1_loss/num": torch.tensor(1.0), "confidence_loss/num": total}
    return LossOutput(total=total, weight=torch.tensor(1.0), metrics=metrics)


def describe(row: int, value: float, *, last: bool) -> str:
    batch = batch_at(3, 0)
    states = (batch.last_hidden_state if last else batch.hidden_states).clone()
    states[row, 4, 1] = value
    batch = dataclasses.replace(batch, **{"last_hidden_state" if last else "hidden_states": states})
    inputs = make_inputs(batch, [ANCHORS, ANCHORS], CONFIG)
    return describe_loss(batch, inputs, total_of_states(inputs), total_of_states)


def test_names_the_sample_the_layer_and_the_terms() -> None:
    text = describe(1, float("nan"), last=False)
    assert text == (
        "step 3: the loss is nan; samples: s31 (non-finite input in captured layer #0; terms ce_loss, confidence_loss)"
    )


def test_names_the_last_hidden_state() -> None:
    assert "s30 (non-finite input in last hidden state;" in describe(0, float("inf"), last=True)


def test_says_when_no_sample_alone_is_to_blame() -> None:
    batch = batch_at(3, 0)
    inputs = make_inputs(batch, [ANCHORS, ANCHORS], CONFIG)
    broken = LossOutput(
        total=torch.tensor(float("inf")),
        weight=torch.tensor(1.0),
        metrics={"l1_loss/num": torch.tensor(float("inf"))},
    )
    text = describe_loss(batch, inputs, broken, total_of_states)
    assert text == "step 3: the loss is inf; samples: none alone, together s30, s31 (l1_loss)"


def packed_batch() -> CacheBatch:
    """Two documents of 6 tokens in one row."""
    batch = batch_at(3, 0)
    return dataclasses.replace(
        batch,
        rows=torch.zeros(2, dtype=torch.int64),
        starts=torch.tensor([0, 6]),
        documents=torch.arange(2).repeat_interleave(6)[None],
        **{
            name: getattr(batch, name).flatten(0, 1)[None].clone()
            for name in ("input_ids", "loss_mask", "hidden_states", "last_hidden_state")
        },
    )


def test_names_the_document_of_a_packed_row() -> None:
    batch = packed_batch()
    batch.hidden_states[0, 6 + 4, 1] = float("nan")
    inputs = make_inputs(batch, [ANCHORS, ANCHORS], CONFIG)
    text = describe_loss(batch, inputs, total_of_states(inputs), total_of_states)
    assert text.endswith("samples: s31 (non-finite input in captured layer #0; terms ce_loss, confidence_loss)")


def test_a_document_alone_has_the_blocks_it_would_have_in_a_row_of_its_own() -> None:
    batch, alone = packed_batch(), []

    def keep(inputs: DrafterInputs) -> LossOutput:
        alone.append(inputs.blocks)
        return total_of_states(inputs)

    inputs = make_inputs(batch, [ANCHORS, ANCHORS], CONFIG)
    describe_loss(batch, inputs, total_of_states(inputs), keep)
    wanted = make_inputs(batch_at(3, 0, size=1), [ANCHORS], CONFIG).blocks
    for field in dataclasses.fields(wanted):
        if field.name != "draftable_tokens":
            assert torch.equal(getattr(alone[1], field.name), getattr(wanted, field.name)), field.name
