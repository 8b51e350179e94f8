"""The loss, reference and chunked, against every golden case, and the properties that training relies on."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.anchors import Blocks, build_blocks
from model.drafter import DSparkDrafter
from model.losses import DrafterInputs, LossConfig, LossOutput, dspark_loss, metric_values, reference_loss
from model.target_heads import TargetHeads
from tests.golden_data import (
    case_names,
    drafter_config,
    golden_anchors,
    golden_blocks,
    golden_inputs,
    grads_of,
    load_case,
    max_error,
    read_json,
    tensors,
    tiny_heads,
)

IMPLEMENTATIONS = {"chunked": dspark_loss, "reference": reference_loss}


@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loss_metrics_and_gradients_are_golden(implementation: str, name: str) -> None:
    case = load_case(name)
    out = IMPLEMENTATIONS[implementation](case.drafter, case.heads, case.inputs, case.loss_config)
    terms, expected = case.scalars["loss_terms"], case.scalars["metrics"]
    close = {"rel": 1e-5, "abs": 1e-6}
    assert float(out.total.detach() / out.weight) == pytest.approx(case.scalars["loss_total"], **close)
    assert float(out.weight) == pytest.approx(terms["ce_loss_den"], **close)
    values = metric_values(out.metrics)
    for term in ("ce_loss", "l1_loss", "confidence_loss"):
        if terms[f"{term}_den"]:
            assert float(out.metrics[f"{term}/num"]) == pytest.approx(terms[f"{term}_num"], **close)
            assert float(out.metrics[f"{term}/den"]) == pytest.approx(terms[f"{term}_den"], **close)
            assert values[term] == pytest.approx(expected[term]["value"], **close)
    for k in range(case.drafter.config.block_size):
        assert values[f"accept_rate@{k + 1}"] == pytest.approx(expected[f"accept_rate@{k}"]["value"], **close)
    assert values["tau"] == pytest.approx(expected["tau_probabilistic"]["value"], **close)
    assert values["loss"] == pytest.approx(case.scalars["loss_total"], **close)
    for metric in ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
        assert (metric in values) == (metric in expected)
        if metric in expected:
            assert values[metric] == pytest.approx(expected[metric]["value"], **close)
    gradients = grads_of(case.drafter, out.total / out.weight)
    assert set(gradients) == set(case.grads)
    for parameter, gradient in gradients.items():
        assert max_error(gradient, case.grads[parameter]) < 1e-6, parameter


SETTINGS = LossConfig(ce=0.1, l1=0.9, confidence=1.0, confidence_detached=False, decay_gamma=4.0, rows_per_chunk=32)
HEADS = ("none", "vanilla", "gated", "rnn")


def random_case(head: str, **overrides: Any) -> tuple[DSparkDrafter, TargetHeads, DrafterInputs]:
    """A drafter of any kind on the golden tokens, in float64; draft_vocab_size=150 leaves 49 tokens out.

    Larger weights than init_weights gives, so that no part of the drafter is too quiet to be wrong.
    """
    rank = 0 if head == "none" else 8
    config = drafter_config(
        markov_head_type=head, markov_rank=rank, confidence_head_with_markov=head not in ("none", "gated"), **overrides
    )
    drafter = DSparkDrafter(config).init_weights(0).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    tiny = tiny_heads().double()
    ids = torch.arange(199).roll(7)[: config.draft_vocab_size] if config.reduces_vocabulary else None
    heads = TargetHeads.from_tensors(tiny.embedding_VD, tiny.lm_head_VD, draft_ids=ids)
    inputs = golden_inputs(golden_blocks(config))
    return (
        drafter,
        heads,
        dataclasses.replace(
            inputs,
            hidden_states_BTC=inputs.hidden_states_BTC.double(),
            last_hidden_BTD=inputs.last_hidden_BTD.double(),
        ),
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("overrides", [{}, {"sample_from_anchor": False}, {"block_size": 3}, {"draft_vocab_size": 150}])
def test_chunked_equals_reference_for_every_drafter(head: str, overrides: dict[str, Any]) -> None:
    drafter, heads, inputs = random_case(head, **overrides)
    config = dataclasses.replace(SETTINGS, rows_per_chunk=9)
    ours, expected = (loss(drafter, heads, inputs, config) for loss in (dspark_loss, reference_loss))
    assert float(ours.total.detach()) == pytest.approx(float(expected.total.detach()), rel=1e-10)
    assert ours.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert float(ours.metrics[name]) == pytest.approx(float(value), rel=1e-10, abs=1e-12), name
    gradients, wanted = grads_of(drafter, ours.total), grads_of(drafter, expected.total)
    for name, gradient in gradients.items():
        assert wanted[name].any(), name
        assert max_error(gradient, wanted[name]) < 1e-10 * float(wanted[name].abs().max()), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_reduced_vocabulary_accepts_what_serving_accepts(implementation: str) -> None:
    """Σ_v min(p, q) over the whole vocabulary, q being zero outside the draft's; labels outside have no CE."""
    drafter, heads, inputs = random_case("vanilla", draft_vocab_size=150)
    out = IMPLEMENTATIONS[implementation](drafter, heads, inputs, SETTINGS)
    blocks = inputs.blocks
    hidden = drafter.backbone(drafter.project_context(inputs.hidden_states_BTC), blocks, heads)
    features = drafter.head_outputs(hidden, blocks.previous_ids).features_AKR
    q = heads.to_target(drafter.draft_logits(hidden, features, heads)).softmax(-1)
    p = heads.logits(inputs.last_hidden_BTD[blocks.rows[:, None], blocks.context_rows]).softmax(-1)
    accept = (torch.minimum(p, q).sum(-1) * blocks.supervised).sum(0)
    for k, value in enumerate(accept.tolist()):
        assert float(out.metrics[f"accept_rate@{k + 1}/num"]) == pytest.approx(value)
    inside = blocks.supervised & torch.isin(blocks.labels, heads.draft_ids)
    assert 0 < int(inside.sum()) < int(blocks.supervised.sum())
    of_label = q.gather(-1, blocks.labels[..., None]).squeeze(-1).log()
    expected = -(blocks.weights * of_label)[inside].sum()
    assert float(out.metrics["ce_loss/num"]) == pytest.approx(float(expected.detach()))
    assert float(out.metrics["ce_loss/den"]) == pytest.approx(float(blocks.weights.sum()))


VARIANTS = read_json("dspark/scalars.json")["variants_b7_vanilla_conf-markov"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "no_anchor"])
def test_golden_variants(name: str, implementation: str) -> None:
    case = load_case("b7_vanilla_conf-markov")
    gamma = {"gamma_none": None, "gamma_zero": 0.0, "gamma_1": 1.0}.get(name, 4.0)
    config = dataclasses.replace(
        case.loss_config,
        l1=0.0 if name == "l1_alpha_zero" else 0.9,
        confidence=0.0 if name == "conf_alpha_zero" else 1.0,
    )
    inputs = golden_inputs(golden_blocks(case.drafter.config, gamma))
    out = IMPLEMENTATIONS[implementation](case.drafter, case.heads, inputs, config)
    assert float(out.total.detach() / out.weight) == pytest.approx(VARIANTS[name]["loss_total"], rel=1e-5)
    gradients = grads_of(case.drafter, out.total / out.weight)
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    assert float(norm) == pytest.approx(VARIANTS[name]["grad_norm"], rel=1e-5)


def no_anchor_blocks() -> list[Blocks]:
    """A batch without anchors, and one whose only block has nothing supervised (another way to say the same)."""
    ids = tensors("inputs")["input_ids"]
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    empty = build_blocks(ids, nothing, [np.zeros(0, np.int64)] * 2, drafter_config(), 4.0)
    one = build_blocks(ids, ~nothing, [np.array([0]), np.zeros(0, np.int64)], drafter_config(), 4.0)
    silent = dataclasses.replace(one, supervised=one.supervised & False, weights=one.weights * 0)
    return [empty, silent]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("blocks", no_anchor_blocks(), ids=["no block", "silent block"])
def test_nothing_to_learn_is_a_zero_that_reaches_every_parameter(implementation: str, blocks: Blocks) -> None:
    assert VARIANTS["no_anchor"]["loss_total"] == 0.0
    drafter = DSparkDrafter(drafter_config()).init_weights(0)
    out = IMPLEMENTATIONS[implementation](drafter, tiny_heads(), golden_inputs(blocks), SETTINGS)
    assert float(out.total.detach()) == 0.0
    assert float(out.weight) == 0.0
    assert all(not gradient.any() for gradient in grads_of(drafter, out.total).values())
    assert metric_values(out.metrics)["ce_loss"] == 0.0


def sums_and_grads(drafter: DSparkDrafter, parts: list[DrafterInputs]) -> tuple[list[LossOutput], dict[str, Tensor]]:
    outs = [dspark_loss(drafter, tiny_heads(), part, SETTINGS) for part in parts]
    total = torch.stack([out.total for out in outs]).sum()
    weight = torch.stack([out.weight for out in outs]).sum()
    return outs, grads_of(drafter, total / weight)


def take(blocks: Blocks, chosen: Tensor) -> Blocks:
    names = [field.name for field in dataclasses.fields(blocks) if field.name != "draftable_tokens"]
    return dataclasses.replace(blocks, **{name: getattr(blocks, name)[chosen] for name in names})


def test_any_split_into_micro_batches_gives_one_gradient() -> None:
    drafter, blocks = DSparkDrafter(drafter_config()).init_weights(0), golden_blocks(drafter_config())
    whole, expected = sums_and_grads(drafter, [golden_inputs(blocks)])
    quarters = [take(blocks, torch.arange(len(blocks.anchors)) % 4 == part) for part in range(4)]
    empty = take(blocks, torch.zeros(0, dtype=torch.int64))
    parts, gradients = sums_and_grads(drafter, [golden_inputs(part) for part in (*quarters, empty)])
    for name, gradient in expected.items():
        assert max_error(gradient, gradients[name]) < 1e-6, name
    for key in whole[0].metrics:
        if not key.startswith("anchor"):  # these two count per call
            total = sum(float(part.metrics[key]) for part in parts)
            assert total == pytest.approx(float(whole[0].metrics[key]), rel=1e-5, abs=1e-5), key


def test_padded_batch_equals_its_samples_alone() -> None:
    drafter = DSparkDrafter(drafter_config()).init_weights(0)
    inputs, anchors = tensors("inputs"), golden_anchors()
    _, expected = sums_and_grads(drafter, [golden_inputs(golden_blocks(drafter_config()))])
    alone = []
    for row, length in enumerate((48, 37)):
        rows = slice(row, row + 1)
        mask = inputs["loss_mask"][rows, :length].bool()
        blocks = build_blocks(inputs["input_ids"][rows, :length], mask, [anchors[row]], drafter_config(), 4.0)
        hidden, last = inputs["target_hidden_states"], inputs["target_last_hidden_states"]
        alone.append(DrafterInputs(hidden[rows, :length], last[rows, :length], blocks))
    _, gradients = sums_and_grads(drafter, alone)
    for name, gradient in expected.items():
        assert max_error(gradient, gradients[name]) < 1e-6, name


def test_anchor_order_is_free() -> None:
    drafter, blocks = DSparkDrafter(drafter_config()).init_weights(0), golden_blocks(drafter_config())
    order = torch.randperm(len(blocks.anchors), generator=torch.Generator().manual_seed(0))
    _, expected = sums_and_grads(drafter, [golden_inputs(blocks)])
    _, gradients = sums_and_grads(drafter, [golden_inputs(take(blocks, order))])
    assert all(max_error(expected[name], gradients[name]) < 1e-6 for name in expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name", ["b7_none_conf-plain", "b7_vanilla_conf-markov", "b7_gated_conf-markov", "b7_rnn_conf-markov"]
)
def test_garbage_at_unsupervised_places_changes_nothing(name: str, implementation: str) -> None:
    case = load_case(name)
    inputs = tensors("inputs")
    mask = inputs["loss_mask"].bool()
    needed = torch.zeros_like(mask)
    needed[case.blocks.rows[:, None], case.blocks.context_rows] = True
    last_anchor = int(case.blocks.anchors.max())
    hidden = inputs["target_hidden_states"].clone()
    hidden[:, last_anchor:] = torch.nan
    garbage = torch.where(torch.arange(48) % 2 == 0, -1, 199).expand(2, 48)
    blocks = build_blocks(
        torch.where(mask, inputs["input_ids"], garbage), mask, golden_anchors(), case.drafter.config, 4.0
    )
    last_hidden = inputs["target_last_hidden_states"].masked_fill(~needed[..., None], torch.nan)
    spoiled = DrafterInputs(hidden, last_hidden, blocks)
    clean = IMPLEMENTATIONS[implementation](case.drafter, case.heads, case.inputs, case.loss_config)
    dirty = IMPLEMENTATIONS[implementation](case.drafter, case.heads, spoiled, case.loss_config)
    assert torch.equal(clean.total, dirty.total)
    expected, gradients = grads_of(case.drafter, clean.total), grads_of(case.drafter, dirty.total)
    assert all(torch.equal(expected[name], gradients[name]) for name in expected)


def test_confidence_stays_finite_for_huge_hidden_states() -> None:
    case = load_case("b7_vanilla_conf-markov")
    with torch.no_grad():
        case.drafter.norm.weight.mul_(1e3)
    out = dspark_loss(case.drafter, case.heads, case.inputs, case.loss_config)
    assert torch.isfinite(out.total)
    assert all(torch.isfinite(gradient).all() for gradient in grads_of(case.drafter, out.total).values())


def test_teacher_and_confidence_target_get_no_gradient() -> None:
    case = load_case("b7_vanilla_conf-markov")
    last = case.inputs.last_hidden_BTD.clone().requires_grad_(True)
    inputs = dataclasses.replace(case.inputs, last_hidden_BTD=last)
    only_confidence = dataclasses.replace(case.loss_config, ce=0.0, l1=0.0)
    for loss in (dspark_loss, reference_loss):
        out = loss(case.drafter, case.heads, inputs, case.loss_config)
        assert torch.autograd.grad(out.total, last, allow_unused=True) == (None,)
        # W2 acts on the confidence target alone here, so it must stay still.
        out = loss(case.drafter, case.heads, case.inputs, only_confidence)
        assert not grads_of(case.drafter, out.total)["markov_head.markov_w2.weight"].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_detached_confidence_term_moves_its_head_alone(implementation: str) -> None:
    case = load_case("b7_vanilla_conf-markov")

    def gradients(weight: float, detached: bool) -> dict[str, torch.Tensor]:
        config = dataclasses.replace(case.loss_config, confidence=weight, confidence_detached=detached)
        out = IMPLEMENTATIONS[implementation](case.drafter, case.heads, case.inputs, config)
        return grads_of(case.drafter, out.total)

    without, detached, joint = gradients(0.0, True), gradients(5.0, True), gradients(5.0, False)
    for name, expected in without.items():
        if name.startswith("confidence_head."):
            assert torch.equal(detached[name], joint[name])
            assert detached[name].any()
        else:
            assert torch.equal(detached[name], expected), name
    assert not torch.allclose(joint["fc.weight"], without["fc.weight"])


def test_coverage_counts_distinct_labels_among_the_draftable() -> None:
    blocks = golden_blocks(drafter_config())
    out = dspark_loss(DSparkDrafter(drafter_config()).init_weights(0), tiny_heads(), golden_inputs(blocks), SETTINGS)
    covered, mask = set(), tensors("inputs")["loss_mask"].bool()
    for row, anchors in enumerate(golden_anchors()):
        for anchor in anchors.tolist():
            labels = itertools.takewhile(lambda p, row=row: p < 48 and mask[row, p], range(anchor + 1, anchor + 8))
            covered |= {(row, label) for label in labels}
    assert float(out.metrics["anchor_coverage/num"]) == len(covered)
    assert float(out.metrics["anchor_coverage/den"]) == int((mask[:, 1:] & mask[:, :-1]).sum())


def test_metric_values_divide_sums() -> None:
    first = {"tau/num": torch.tensor(3.0), "tau/den": torch.tensor(1.0)}
    second = {"tau/num": torch.tensor(99.0), "tau/den": torch.tensor(99.0)}
    total = {key: first[key] + second[key] for key in first}
    assert metric_values(total) == {"tau": pytest.approx(1.02)}
    assert metric_values({"tau/num": 0.0, "tau/den": 0.0}) == {"tau": 0.0}
