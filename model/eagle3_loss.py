"""The EAGLE-3 loss: soft cross entropy against the target's distribution at every step of the training-time test.

`Σ w_k · (-Σ_v p(v) log q_k(v))` with w_k = decay^k on supervised steps, as additive sums like losses.py. The lm_head is
frozen, so chunks of [rows, V] logits become gradients in the forward pass; the target's distribution is computed
once per position. With a reduced draft vocabulary the target's distribution is renormalised to it for the cross
entropy, not for the acceptance. Legend: A blocks, K = γ steps, R supervised slots, D hidden, V_d draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from model.eagle3 import Eagle3Drafter
from model.errors import AnchorError
from model.losses import DrafterInputs, LossConfig, LossOutput
from model.target_heads import TargetHeads


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Of the supervised slots, in the order of blocks.supervised."""

    objective: Tensor
    """Σ w·CE, differentiable."""
    ce: Tensor
    accept: Tensor
    """Σ_v min(p, q): the probability that rejection sampling accepts a draft from q."""
    hit: Tensor
    """Whether the most likely draft token is the target's most likely token."""


def eagle3_loss(drafter: Eagle3Drafter, heads: TargetHeads, inputs: DrafterInputs, config: LossConfig) -> LossOutput:
    """The training-time test of one micro-batch; `config.ce` scales the soft cross entropy, the other terms are 0.

    Without anchors the total is 0, still connected to every trainable parameter.
    Raises AnchorError for an anchor at the first token of a sample, or without inputs.input_ids_BT.
    """
    if inputs.input_ids_BT is None:
        raise AnchorError("EAGLE-3 reads the tokens of the context; give DrafterInputs its input_ids_BT")
    blocks = inputs.blocks
    if len(blocks.anchors) == 0:
        # Sums over empty slices: zero gradients without reading a value.
        nothing = blocks.weights.new_zeros(0)
        zero = blocks.weights.sum() + sum(p.reshape(-1)[:0].sum().float() for p in drafter.parameters())
        return _output(inputs, _Rows(torch.as_tensor(zero), nothing, nothing, nothing))
    features_AKD = drafter.unroll(inputs.hidden_states_BTC, inputs.input_ids_BT, blocks, heads)
    hidden_RD = drafter.norm(features_AKD)[blocks.supervised]
    job = _Job(
        last_hidden_BTD=inputs.last_hidden_BTD.detach(),
        places=(
            blocks.rows[:, None].expand_as(blocks.labels)[blocks.supervised],
            blocks.context_rows[blocks.supervised],
        ),
        weights=blocks.weights[blocks.supervised] * config.ce,
        rows_per_chunk=config.rows_per_chunk,
        heads=heads,
    )
    objective, ce, accept, hit = _SoftCrossEntropy.apply(hidden_RD, job)
    return _output(inputs, _Rows(objective, ce, accept, hit))


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """What the autograd function needs that is not differentiated."""

    last_hidden_BTD: Tensor
    places: tuple[Tensor, Tensor]
    """Row and column of the last hidden state that predicts each slot's label, [R] each."""
    weights: Tensor
    rows_per_chunk: int
    heads: TargetHeads


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, job: _Job) -> tuple[Tensor, ...]:
        dtype = torch.float64 if hidden_RD.dtype == torch.float64 else torch.float32
        ce, accept, hit = (hidden_RD.new_empty(len(hidden_RD), dtype=dtype) for _ in range(3))
        gradient = torch.empty_like(hidden_RD)
        head = job.heads.draft_head_VD
        # Slots in the order of the positions that predict their labels, so that those of a chunk share target rows.
        flat = job.places[0] * job.last_hidden_BTD.shape[1] + job.places[1]
        for slots in torch.argsort(flat).split(job.rows_per_chunk):
            p, best = _target(job, flat[slots])
            log_q = job.heads.draft_logits(hidden_RD[slots]).log_softmax(dim=-1, dtype=dtype)
            q, within = log_q.exp(), _renormalised(p, job.heads)
            ce[slots] = -(within * log_q).sum(dim=-1)
            accept[slots] = torch.minimum(q, p).sum(dim=-1)
            hit[slots] = (job.heads.to_target(log_q).argmax(dim=-1) == best).to(dtype)
            # Not every row of the target has mass inside a reduced vocabulary, hence its sum instead of one.
            d_logits = (q * within.sum(dim=-1, keepdim=True) - within) * job.weights[slots, None]
            gradient[slots] = (d_logits.to(head.dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ce, accept, hit)
        return (job.weights * ce).sum(), ce, accept, hit

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None


def _target(job: _Job, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [n, V_d] of the draft vocabulary and the most likely token [n] of all, by the target."""
    distinct, row = torch.unique(flat, return_inverse=True)
    length = job.last_hidden_BTD.shape[1]
    logits = job.heads.logits(job.last_hidden_BTD[distinct // length, distinct % length])
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    p = logits.softmax(dim=-1, dtype=dtype)
    ids = job.heads.draft_ids
    return (p if ids is None else p[:, ids])[row], logits.argmax(dim=-1)[row]


def _renormalised(p: Tensor, heads: TargetHeads) -> Tensor:
    """p over the draft vocabulary alone; a row without any mass there stays 0 and teaches nothing."""
    return p if heads.draft_ids is None else torch.nan_to_num(p / p.sum(dim=-1, keepdim=True))


def _output(inputs: DrafterInputs, rows: _Rows) -> LossOutput:
    """Totals and metrics; the same names as losses.py where the meaning is the same."""
    blocks = inputs.blocks
    chosen = blocks.supervised
    weights = blocks.weights[chosen]
    accept_AK, hit_AK = (torch.zeros_like(blocks.weights) for _ in range(2))
    accept_AK[chosen], hit_AK[chosen] = rows.accept.to(weights.dtype), rows.hit.to(weights.dtype)
    labels = (blocks.rows[:, None] * inputs.last_hidden_BTD.shape[1] + blocks.context_rows)[chosen]
    counted = float(chosen[:, 0].sum()) if len(chosen) else 0.0

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=weights.device)

    sums = {
        "loss/num": rows.objective.detach(),
        "ce_loss/num": (weights * rows.ce).sum(),
        # A block counts when its first step does: 1 + Σ_k Π_{j<=k}, bonus token included.
        "tau/num": ((1.0 + accept_AK.cumprod(dim=1).sum(dim=1)) * chosen[:, 0]).sum(),
        "tau/den": number(counted),
        "tau_greedy/num": ((1.0 + hit_AK.cumprod(dim=1).sum(dim=1)) * chosen[:, 0]).sum(),
        "tau_greedy/den": number(counted),
        "anchor_coverage/num": number(len(torch.unique(labels))),
        "anchor_coverage/den": number(blocks.draftable_tokens),
        "anchors/num": number(len(blocks.anchors)),
        "anchors/den": number(1.0),
    }
    sums["loss/den"] = sums["ce_loss/den"] = weights.sum()
    counts = chosen.sum(dim=0).float()
    for k in range(chosen.shape[1]):
        sums[f"accept_rate@{k + 1}/num"] = accept_AK[:, k].sum()
        sums[f"accuracy@{k + 1}/num"] = hit_AK[:, k].sum()
        sums[f"accept_rate@{k + 1}/den"] = sums[f"accuracy@{k + 1}/den"] = counts[k]
    return LossOutput(total=rows.objective, weight=weights.sum(), metrics=sums)
