"""The DSpark loss (§3.3): CE + L1 + confidence BCE as additive sums, and the metrics that fall out of the same pass.

`dspark_loss` is what training uses (chunked_loss.py does the [rows, V] work); `reference_loss` is the formula with all
logits alive, for tests. Both return Σ w·loss over local slots, NOT divided: the caller divides by the global Σ w, so
any split into ranks and micro-batches has one gradient. Legend: A blocks, K = γ draft positions, R supervised slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from model.anchors import Blocks
from model.chunked_loss import DraftRows, SlotTargets, chunked_rows, draft_labels
from model.drafter import DSparkDrafter, HeadOutputs
from model.row_loss import RowTerms, compute_dtype
from model.target_heads import TargetHeads


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Weights of the terms; the defaults live in the job's configuration."""

    ce: float
    l1: float
    confidence: float
    confidence_detached: bool
    """The confidence term has no gradient beyond its own head."""
    decay_gamma: float
    """Already applied in Blocks.weights; kept here so that one object describes the objective."""
    rows_per_chunk: int
    """Rows of [V] logits alive at a time (row_loss.RowTerms)."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrafterInputs:
    """One micro-batch, all on the drafter's device."""

    hidden_states_BTC: Tensor
    """Captured layers of the target, concatenated ascending per token; any float dtype. Padding may hold any finite
    value: no block reads it, but its rows are projected with the others."""
    last_hidden_BTD: Tensor
    """After the target's final norm; row i predicts token i+1. Read only where a supervised label needs it."""
    blocks: Blocks
    input_ids_BT: Tensor | None = None
    """int64 token ids; EAGLE-3 alone reads them."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossOutput:
    """Sums over the local slots."""

    total: Tensor
    """Σ w·(ce·CE + l1·L1 + confidence·BCE), float32 scalar, differentiable."""
    weight: Tensor
    """Σ w, float32 scalar."""
    metrics: dict[str, Tensor]
    """`<name>/num` and `<name>/den`, float32 scalars: add them over micro-batches and ranks, then metric_values."""


@dataclasses.dataclass(frozen=True, slots=True)
class _RowLosses:
    """Per supervised slot, in the order of blocks.supervised: float32 [R]."""

    objective: Tensor
    """Scalar Σ w·(ce·CE + l1·L1), differentiable."""
    ce: Tensor
    l1: Tensor
    distinct_labels: int
    """Label positions that some slot predicts."""


def dspark_loss(drafter: DSparkDrafter, heads: TargetHeads, inputs: DrafterInputs, config: LossConfig) -> LossOutput:
    """The training objective of one micro-batch with at most one chunk of [rows_per_chunk, V] logits alive.

    The target's distribution is computed once per distinct label position, and the gradient with respect to the
    logits within the forward pass. Without anchors the total is 0, still connected to every trainable parameter.
    """
    blocks = inputs.blocks
    if len(blocks.anchors) == 0:
        return _empty_output(drafter, inputs)
    hidden_AKD = _block_hidden(drafter, heads, inputs)
    small = drafter.head_outputs(hidden_AKD, blocks.previous_ids, detach_confidence=config.confidence_detached)
    target = _target_rows(inputs)
    draft = _draft_rows(drafter, hidden_AKD, small, target, blocks)
    terms = RowTerms(ce=config.ce, l1=config.l1, rows_per_chunk=config.rows_per_chunk)
    ce, l1, objective = chunked_rows(draft, target, heads, terms)
    rows = _RowLosses(objective=objective, ce=ce, l1=l1, distinct_labels=len(target.last_hidden_UD))
    return _combine(inputs, config, rows, small.confidence_AK)


def reference_loss(drafter: DSparkDrafter, heads: TargetHeads, inputs: DrafterInputs, config: LossConfig) -> LossOutput:
    """The same by plain autograd over the logits of every slot: [A, K, V] several times over."""
    blocks = inputs.blocks
    if len(blocks.anchors) == 0:
        return _empty_output(drafter, inputs)
    hidden_AKD = _block_hidden(drafter, heads, inputs)
    small = drafter.head_outputs(hidden_AKD, blocks.previous_ids, detach_confidence=config.confidence_detached)
    draft_logits = drafter.draft_logits(hidden_AKD, small.features_AKR, heads)
    draft_logits = draft_logits.to(compute_dtype(draft_logits))
    last_hidden = inputs.last_hidden_BTD[blocks.rows[:, None], blocks.context_rows]
    target = heads.logits(last_hidden.detach()).to(draft_logits.dtype).softmax(dim=-1)[blocks.supervised]
    log_q = draft_logits.log_softmax(dim=-1)[blocks.supervised]
    labels = draft_labels(blocks.labels[blocks.supervised], heads)
    ce = -log_q.gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1) * (labels >= 0)
    l1 = (heads.to_target(log_q).exp() - target).abs().sum(dim=-1)
    objective = (blocks.weights[blocks.supervised] * (config.ce * ce + config.l1 * l1)).sum()
    distinct = len(_target_rows(inputs).last_hidden_UD)
    rows = _RowLosses(objective=objective, ce=ce.detach(), l1=l1.detach(), distinct_labels=distinct)
    return _combine(inputs, config, rows, small.confidence_AK)


def _target_rows(inputs: DrafterInputs) -> SlotTargets:
    blocks, last_hidden = inputs.blocks, inputs.last_hidden_BTD
    length = last_hidden.shape[1]
    flat = (blocks.rows[:, None] * length + blocks.context_rows)[blocks.supervised]
    distinct, row_of_slot = torch.unique(flat, return_inverse=True)
    return SlotTargets(
        last_hidden_UD=last_hidden[distinct // length, distinct % length].detach(),
        row_of_slot=row_of_slot,
        labels=blocks.labels[blocks.supervised],
        weights=blocks.weights[blocks.supervised],
    )


def _draft_rows(
    drafter: DSparkDrafter, hidden_AKD: Tensor, small: HeadOutputs, target: SlotTargets, blocks: Blocks
) -> DraftRows:
    """The supervised slots; one row of features per target row when they are those of the previous token alone."""
    hidden_RD, head = hidden_AKD[blocks.supervised], drafter.markov_head
    if head is None or small.features_AKR is None:
        return DraftRows(hidden_RD, None, None)
    features_RM = small.features_AKR[blocks.supervised]
    if head.reads_hidden:
        return DraftRows(hidden_RD, features_RM, head.markov_w2.weight)
    # The previous token stands at the label's target row, so any slot of that row has the row's features.
    slots = torch.arange(len(hidden_RD), device=hidden_RD.device)
    slot_of_row = slots.new_zeros(len(target.last_hidden_UD)).scatter_reduce_(0, target.row_of_slot, slots, "amax")
    return DraftRows(hidden_RD, features_RM[slot_of_row], head.markov_w2.weight, shared_features=True)


def _block_hidden(drafter: DSparkDrafter, heads: TargetHeads, inputs: DrafterInputs) -> Tensor:
    # No block reads the context at or after the last anchor, so that part is never projected.
    needed = int(inputs.blocks.anchors.max())
    context_BTD = drafter.project_context(inputs.hidden_states_BTC[:, :needed])
    return drafter.backbone(context_BTD, inputs.blocks, heads)


def _combine(inputs: DrafterInputs, config: LossConfig, rows: _RowLosses, confidence_AK: Tensor | None) -> LossOutput:
    """Add the confidence term (its target is detached) and collect the metrics."""
    blocks = inputs.blocks
    weights = blocks.weights[blocks.supervised]
    accept = (1.0 - 0.5 * rows.l1).clamp(0.0, 1.0)
    total = rows.objective
    sums = _metric_sums(blocks, rows, accept)
    if confidence_AK is not None:
        logits = confidence_AK[blocks.supervised].to(accept.dtype)
        bce = F.binary_cross_entropy_with_logits(logits, accept, reduction="none")
        total = total + config.confidence * (weights * bce).sum()
        sums |= _confidence_sums(blocks, logits.detach().sigmoid(), accept)
        sums["confidence_loss/num"] = (weights * bce.detach()).sum()
        sums["confidence_loss/den"] = weights.sum()
    sums["loss/num"], sums["loss/den"] = total.detach(), weights.sum()
    return LossOutput(total=total, weight=weights.sum(), metrics=sums)


def _metric_sums(blocks: Blocks, rows: _RowLosses, accept_R: Tensor) -> dict[str, Tensor]:
    weights = blocks.weights[blocks.supervised]
    accept_AK = accept_R.new_zeros(blocks.weights.shape)
    accept_AK[blocks.supervised] = accept_R
    num_blocks, draftable = _number(len(blocks.anchors), weights), _number(blocks.draftable_tokens, weights)
    sums = {
        "ce_loss/num": (weights * rows.ce).sum(),
        "ce_loss/den": weights.sum(),
        "l1_loss/num": (weights * rows.l1).sum(),
        "l1_loss/den": weights.sum(),
        # Expected accepted length, bonus token included: 1 + Σ_k Π_{j<=k} accept_j.
        "tau/num": (1.0 + accept_AK.cumprod(dim=1).sum(dim=1)).sum(),
        "tau/den": num_blocks,
        "anchor_coverage/num": _number(rows.distinct_labels, weights),
        "anchor_coverage/den": draftable,
        # Every draftable token follows one legal anchor, so the two are equally many.
        "anchors_drawn/num": num_blocks,
        "anchors_drawn/den": draftable,
        "anchors/num": num_blocks,
        "anchors/den": _number(1, weights),
    }
    counts, accepted = blocks.supervised.sum(dim=0).float(), accept_AK.sum(dim=0)
    for k in range(blocks.supervised.shape[1]):
        sums[f"accept_rate@{k + 1}/num"] = accepted[k]
        sums[f"accept_rate@{k + 1}/den"] = counts[k]
    return sums


def _confidence_sums(blocks: Blocks, predicted_R: Tensor, accept_R: Tensor) -> dict[str, Tensor]:
    weights = blocks.weights
    predicted, accept = accept_R.new_zeros(weights.shape), accept_R.new_zeros(weights.shape)
    predicted[blocks.supervised], accept[blocks.supervised] = predicted_R, accept_R
    error = predicted - accept
    prefix_error = predicted.cumprod(dim=1) - accept.cumprod(dim=1)
    sums = {
        "confidence_abs_error/num": (weights * error.abs()).sum(),
        "confidence_bias/num": (weights * error).sum(),
        "confidence_cumprod_bias/num": (weights * prefix_error).sum(),
    }
    return sums | {name.replace("/num", "/den"): weights.sum() for name in sums}


def _number(value: int, like: Tensor) -> Tensor:
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def _empty_output(drafter: DSparkDrafter, inputs: DrafterInputs) -> LossOutput:
    """No anchor on this rank: a zero that reaches every parameter, so that gradient reduction stays in step."""
    blocks = inputs.blocks
    zero = blocks.weights.sum()
    # Sums over empty slices: zero gradients without reading a value, so even a broken weight adds no NaN.
    total = zero + sum(p.reshape(-1)[:0].sum().float() for p in drafter.parameters() if p.requires_grad)
    nothing = zero.new_zeros(0)
    sums = _metric_sums(blocks, _RowLosses(objective=zero, ce=nothing, l1=nothing, distinct_labels=0), nothing)
    if drafter.confidence_head is not None:
        sums |= _confidence_sums(blocks, nothing, nothing)
        sums["confidence_loss/num"], sums["confidence_loss/den"] = zero, zero
    sums["loss/num"], sums["loss/den"] = zero, zero
    return LossOutput(total=torch.as_tensor(total), weight=zero, metrics=sums)


def metric_values(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """num / den of summed metrics, 0 where den is 0.

    accept_rate@k (k from 1) is the mean expected acceptance 1 - ½‖q-p‖₁ at position k under teacher forcing; tau the
    expected accepted length per block, bonus token included; anchor_coverage the share of draftable tokens that were a
    label; anchors_drawn the share of legal anchors; anchors a plain mean over calls. ce_loss, l1_loss, confidence_loss
    and loss are per unit of weight.
    """
    names = [name.removesuffix("/num") for name in sums if name.endswith("/num")]
    pairs = {name: (float(sums[f"{name}/num"]), float(sums[f"{name}/den"])) for name in names}
    return {name: num / den if den else 0.0 for name, (num, den) in pairs.items()}
