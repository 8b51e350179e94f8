from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from model.anchors import build_blocks
from model.eagle3 import Eagle3Drafter
from model.eagle3_loss import eagle3_loss
from model.errors import AnchorError
from model.losses import DrafterInputs, metric_values
from model.target_heads import TargetHeads
from tests.golden_data import golden_anchors, max_error, tensors
from tests.golden_eagle3 import DECAY, STEPS, Eagle3Case, eagle3_config, load_eagle3


def grads_of(drafter: Eagle3Drafter, total: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def test_loss_metrics_and_gradients_are_golden() -> None:
    case = load_eagle3()
    out = eagle3_loss(case.drafter, case.heads, case.inputs, case.loss_config)
    # The reference divides by padded length times batch, we by the weight: B·S = 96.
    loss, close = out.total / 96, {"rel": 1e-5, "abs": 1e-6}
    assert float(loss.detach()) == pytest.approx(case.scalars["loss_total"], **close)
    assert float(loss.detach()) == pytest.approx(float(case.tensors["loss_total"]), **close)
    assert float(out.weight) == pytest.approx(43 * sum(DECAY**step for step in range(STEPS)), rel=1e-6)
    values, expected = metric_values(out.metrics), case.scalars["metrics"]
    for step in range(STEPS):
        assert float(out.metrics[f"accept_rate@{step + 1}/den"]) == expected[f"accept_rate@{step}"]["den"]
        assert values[f"accept_rate@{step + 1}"] == pytest.approx(expected[f"accept_rate@{step}"]["value"], **close)
        assert values[f"accuracy@{step + 1}"] == pytest.approx(expected[f"accuracy@{step}"]["value"], **close)
    assert values["tau"] == pytest.approx(expected["tau_probabilistic"]["value"], **close)
    assert values["tau_greedy"] == pytest.approx(expected["tau_greedy"]["value"], **close)
    gradients = grads_of(case.drafter, loss)
    wanted = {name.removeprefix("grad."): g for name, g in case.tensors.items() if name.startswith("grad.")}
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert max_error(gradient, wanted[name]) < 1e-6, name


@pytest.mark.parametrize("step", range(STEPS))
def test_the_loss_of_each_step_is_golden(step: int) -> None:
    case = load_eagle3()
    blocks = case.inputs.blocks
    only = torch.zeros_like(blocks.weights)
    only[:, step] = blocks.supervised[:, step].float()
    inputs = dataclasses.replace(case.inputs, blocks=dataclasses.replace(blocks, weights=only))
    out = eagle3_loss(case.drafter, case.heads, inputs, case.loss_config)
    assert float(out.total.detach()) / 96 == pytest.approx(float(case.tensors[f"step{step}.loss"]), rel=1e-5)


def our_inputs(case: Eagle3Case) -> DrafterInputs:
    """The golden sample with our own anchors: supervision begins where drafting begins."""
    inputs = tensors("inputs")
    blocks = build_blocks(inputs["input_ids"], inputs["loss_mask"].bool(), golden_anchors(), case.drafter.config, 4.0)
    return dataclasses.replace(case.inputs, blocks=blocks)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 10**6])
def test_chunks_equal_plain_autograd(rows_per_chunk: int, reduced: bool) -> None:
    case = load_eagle3()
    heads = case.heads
    if reduced:
        heads = TargetHeads.from_tensors(heads.embedding_VD, heads.lm_head_VD, draft_ids=torch.arange(0, 199, 3))
    case.drafter.double()
    heads.double()
    inputs = our_inputs(case)
    config = dataclasses.replace(case.loss_config, rows_per_chunk=rows_per_chunk)
    out = eagle3_loss(case.drafter, heads, inputs, config)

    blocks, ids = inputs.blocks, inputs.input_ids_BT
    assert ids is not None
    hidden = case.drafter.norm(case.drafter.unroll(inputs.hidden_states_BTC, ids, blocks, heads))
    log_q = heads.draft_logits(hidden).log_softmax(-1)
    p = heads.logits(inputs.last_hidden_BTD.double()[blocks.rows[:, None], blocks.context_rows]).softmax(-1)
    p = p if heads.draft_ids is None else p[..., heads.draft_ids]
    ce = -(p / p.sum(-1, keepdim=True) * log_q).sum(-1)
    total = (blocks.weights * ce)[blocks.supervised].sum()
    assert float(out.total.detach()) == pytest.approx(float(total.detach()), rel=1e-7)
    accept = torch.minimum(log_q.exp(), p).sum(-1)
    assert float(out.metrics["accept_rate@2/num"]) == pytest.approx(
        float(accept[:, 1][blocks.supervised[:, 1]].sum().detach()), rel=1e-6
    )
    expected, found = grads_of(case.drafter, total), grads_of(case.drafter, out.total)
    assert all(max_error(expected[name], found[name]) < 1e-9 for name in expected)


def test_garbage_at_unsupervised_places_changes_nothing() -> None:
    case = load_eagle3()
    clean = our_inputs(case)
    mask = tensors("inputs")["loss_mask"].bool()
    needed = torch.zeros_like(mask)
    needed[clean.blocks.rows[:, None], clean.blocks.context_rows] = True
    last = int(clean.blocks.anchors.max())
    ids, hidden = tensors("inputs")["input_ids"].clone(), clean.hidden_states_BTC.clone()
    ids[:, last + 1 :], hidden[:, last:] = torch.tensor([[-1], [199]]), torch.nan
    dirty = DrafterInputs(hidden, clean.last_hidden_BTD.masked_fill(~needed[..., None], torch.nan), clean.blocks, ids)
    one, two = (eagle3_loss(case.drafter, case.heads, inputs, case.loss_config) for inputs in (clean, dirty))
    assert torch.equal(one.total, two.total)
    expected, found = grads_of(case.drafter, one.total), grads_of(case.drafter, two.total)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_no_anchor_is_a_zero_that_reaches_every_parameter() -> None:
    case = load_eagle3()
    ids = tensors("inputs")["input_ids"]
    blocks = build_blocks(ids, ids < 0, [np.zeros(0, np.int64)] * 2, eagle3_config(), 4.0)
    out = eagle3_loss(case.drafter, case.heads, dataclasses.replace(case.inputs, blocks=blocks), case.loss_config)
    assert (float(out.total.detach()), float(out.weight)) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in grads_of(case.drafter, out.total).values())
    assert metric_values(out.metrics)["tau"] == 0.0


def test_tokens_are_required() -> None:
    case = load_eagle3()
    with pytest.raises(AnchorError, match="input_ids_BT"):
        eagle3_loss(case.drafter, case.heads, dataclasses.replace(case.inputs, input_ids_BT=None), case.loss_config)
