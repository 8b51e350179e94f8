"""Every DSpark and DFlash file of tests/golden, reproduced in float64 within the makers' own float64 error.

`error_vs_float64.json` says how far the golden float32 numbers are from float64 restatements of the same maths. Ours in
float64 may not be further away than that by more than the rounding of the figures. test_losses.py has float32.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from model.anchors import Blocks
from model.losses import LossConfig, LossOutput, dspark_loss, metric_values, reference_loss
from tests.golden_data import Case, case_names, golden_blocks, golden_inputs, grads_of, load_case, max_error, read_json

IMPLEMENTATIONS = {"chunked": dspark_loss, "reference": reference_loss}
ERRORS = {name: 1.05 * value for name, value in read_json("dspark/error_vs_float64.json").items()}
SCALARS = read_json("dspark/scalars.json")
VARIANTS = SCALARS["variants_b7_vanilla_conf-markov"]
METRICS = {"tau": "tau_probabilistic", **{f"accept_rate@{k + 1}": f"accept_rate@{k}" for k in range(7)}} | {
    name: name
    for name in (
        "ce_loss", "l1_loss", "confidence_loss", "loss",
        "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias",
    )
}  # fmt: skip


def double_case(name: str) -> Case:
    case = load_case(name)
    blocks = double_blocks(case.blocks, case.loss_config.decay_gamma)
    inputs = dataclasses.replace(
        case.inputs,
        hidden_states_BTC=case.inputs.hidden_states_BTC.double(),
        last_hidden_BTD=case.inputs.last_hidden_BTD.double(),
        blocks=blocks,
    )
    return dataclasses.replace(
        case, drafter=case.drafter.double(), heads=case.heads.double(), inputs=inputs, blocks=blocks
    )


def double_blocks(blocks: Blocks, gamma: float | None) -> Blocks:
    """The same with weights in float64 (they are made in float32)."""
    k = torch.arange(blocks.weights.shape[1], dtype=torch.float64)
    weights = blocks.supervised * (torch.exp(-k / gamma) if gamma else torch.ones_like(k))
    assert max_error(weights, blocks.weights) < 1e-7
    return dataclasses.replace(blocks, weights=weights)


def relative(found: float, golden: float) -> float:
    return abs(found - golden) / max(abs(golden), 1e-12)


@pytest.mark.parametrize("name", case_names())
def test_tensors(name: str) -> None:
    case = double_case(name)
    drafter, blocks, mask = case.drafter, case.blocks, case.blocks.supervised
    context = drafter.project_context(case.inputs.hidden_states_BTC)
    hidden = drafter.backbone(context, blocks, case.heads)
    small = drafter.head_outputs(hidden, blocks.previous_ids)
    draft = drafter.draft_logits(hidden, small.features_AKR, case.heads)
    target = case.heads.logits(case.inputs.last_hidden_BTD[blocks.rows[:, None], blocks.context_rows])
    accept = 1.0 - 0.5 * (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    pairs = {
        "backbone_hidden": (hidden, case.common["backbone_hidden"]),
        "draft_logits": (draft, case.logits["draft_logits"]),
        "aligned_target_logits": (target, case.common["aligned_target_logits"]),
        "accept_rate": (accept, case.logits["accept_rate"]),
        "loss_weight": (blocks.weights, case.common["loss_weight"]),
    }
    if case.confidence_pred is not None:
        assert small.confidence_AK is not None
        pairs["confidence_pred"] = (small.confidence_AK, case.confidence_pred)
    for tensor, (found, golden) in pairs.items():
        assert max_error(found[mask], case.kept(golden)[mask]) <= ERRORS[tensor], tensor
    assert torch.equal(blocks.labels[mask], case.kept(case.common["target_ids"])[mask])
    assert torch.equal(mask, case.kept(case.common["eval_mask"]).bool())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", case_names())
def test_loss_metrics_and_gradients(name: str, implementation: str) -> None:
    case = double_case(name)
    out = IMPLEMENTATIONS[implementation](case.drafter, case.heads, case.inputs, case.loss_config)
    assert out.total.dtype == torch.float64
    check_scalars(out, case.scalars, case.loss_config)
    for parameter, gradient in grads_of(case.drafter, out.total / out.weight).items():
        assert max_error(gradient, case.grads[parameter]) <= ERRORS["grads"], parameter


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "no_anchor"])
def test_variants(name: str, implementation: str) -> None:
    """Other decays and weights; a batch without anchors is in test_losses.py."""
    case = double_case("b7_vanilla_conf-markov")
    gamma = {"gamma_none": None, "gamma_zero": 0.0, "gamma_1": 1.0}.get(name, 4.0)
    blocks = double_blocks(golden_blocks(case.drafter.config, gamma), gamma)
    inputs = dataclasses.replace(case.inputs, blocks=blocks)
    config = dataclasses.replace(
        case.loss_config,
        l1=0.0 if name == "l1_alpha_zero" else 0.9,
        confidence=0.0 if name == "conf_alpha_zero" else 1.0,
    )
    out = IMPLEMENTATIONS[implementation](case.drafter, case.heads, inputs, config)
    check_scalars(out, VARIANTS[name], config)
    gradients = grads_of(case.drafter, out.total / out.weight)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert relative(float(norm), VARIANTS[name]["grad_norm"]) < 1e-6


def check_scalars(out: LossOutput, golden: dict[str, dict[str, float]], config: LossConfig) -> None:
    total: Tensor = out.total.detach() / out.weight
    assert relative(float(total), golden["loss_total"]) <= ERRORS["loss_total"]
    # The reference does not compute a term of weight 0; ours does, for the metrics.
    terms = {"ce_loss": config.ce, "l1_loss": config.l1, "confidence_loss": config.confidence}
    for term, weight in terms.items():
        if golden["loss_terms"][f"{term}_den"] and weight:
            for part in ("num", "den"):
                found = float(out.metrics[f"{term}/{part}"])
                assert relative(found, golden["loss_terms"][f"{term}_{part}"]) <= ERRORS["loss_terms"], term
    values = metric_values(out.metrics)
    for ours, theirs in METRICS.items():
        skipped = terms.get(ours) == 0
        if theirs in golden["metrics"] and not skipped:
            metric = golden["metrics"][theirs]
            found = metric if isinstance(metric, float) else metric["value"]
            assert relative(values[ours], found) <= ERRORS["metrics"], ours


def test_sampler_metrics() -> None:
    """The reference's shares of anchors, from our additive sums: all legal anchors of sample 1, 16 of sample 0."""
    case = load_case("b7_vanilla_conf-markov")
    golden = case.scalars["sampler_metrics"]
    out = dspark_loss(case.drafter, case.heads, golden_inputs(case.blocks), case.loss_config)
    assert float(out.metrics["anchors_drawn/num"]) == golden["sampled_anchors_abs"]["num"]
    assert float(out.metrics["anchors_drawn/den"]) == golden["valid_anchors_abs"]["num"]
    per_block = case.blocks.supervised.sum(1).double()
    means = [float(per_block[case.blocks.rows == row].mean()) for row in range(2)]
    assert sum(means) == pytest.approx(golden["block_supervised_tokens_abs"]["num"])
