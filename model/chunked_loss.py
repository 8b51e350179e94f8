"""lm_head + Markov bias + softmax + CE + L1 in chunks, with the gradient computed in the forward pass.

The loss and its gradient with respect to the logits are row-wise, and the lm_head is frozen, so a chunk of [rows, V]
logits is turned at once into d hidden, d features and d W2 and then forgotten. With q = softmax(z), p the target's
distribution, s = sign(q - p) and row weight w:

    dL/dz = w · ( ce · (q - onehot(label)) + l1 · q ⊙ (s - <s, q>) )

The slots are ordered by target row, so each chunk computes p once for all slots that share a label position.
Legend: R supervised slots, U distinct target rows, V vocabulary, D hidden, M Markov rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from model.target_heads import TargetHeads

# On a CPU the element-wise work is done for this many rows at a time, so that it stays in the last-level cache.
_CPU_ROWS_IN_CACHE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTargets:
    """What the supervised slots are compared with, and how much each counts."""

    last_hidden_UD: Tensor
    """The target's last hidden state at the distinct rows that predict a label."""
    row_of_slot: Tensor
    """int64 [R]: which of the U rows holds the slot's target distribution."""
    labels: Tensor
    """int64 [R]."""
    weights: Tensor
    """float32 [R]."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRows:
    """The drafter's side: logits = lm_head(hidden) + W2 features; the last two are None without a Markov head."""

    hidden_RD: Tensor
    features_RM: Tensor | None
    w2_VM: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class RowTerms:
    """Weights of the two terms that need logits, and the size of a chunk."""

    ce: float
    l1: float
    rows_per_chunk: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Slots [start, stop) of the sorted order and the target rows [first_row, last_row) they use."""

    start: int
    stop: int
    first_row: int
    last_row: int


def chunked_rows(
    draft: DraftRows, target: SlotTargets, heads: TargetHeads, terms: RowTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """(CE [R], L1 [R], Σ w·(ce·CE + l1·L1)) in float32; only the last is differentiable.

    hidden and features may be bf16: matrix products run in their dtype, softmax and losses in float32.
    """
    order = torch.argsort(target.row_of_slot, stable=True)
    job = _Job(order=order, target=target, heads=heads, terms=terms, with_gradient=torch.is_grad_enabled())
    return _ChunkedRows.apply(draft.hidden_RD, draft.features_RM, draft.w2_VM, job)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Everything the autograd function needs that is not differentiated."""

    order: Tensor
    target: SlotTargets
    heads: TargetHeads
    terms: RowTerms
    with_gradient: bool


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, features: Tensor | None, w2: Tensor | None, job: _Job
    ) -> tuple[Tensor, Tensor, Tensor]:
        draft = DraftRows(hidden, features, w2)
        grads = _Gradients(draft) if job.with_gradient else None
        ce, l1 = hidden.new_empty(len(hidden), dtype=torch.float32), hidden.new_empty(len(hidden), dtype=torch.float32)
        for chunk in _chunks(job.target.row_of_slot[job.order], job.terms.rows_per_chunk):
            _run_chunk(chunk, draft, job, (ce, l1), grads)
        objective = (job.target.weights * (job.terms.ce * ce + job.terms.l1 * l1)).sum()
        ctx.mark_non_differentiable(ce, l1)
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.features, None if w2 is None else grads.w2.to(w2.dtype))
        return ce, l1, objective

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[2]
        return *(None if g is None else g * scale.to(g.dtype) for g in ctx.saved_tensors), None


class _Gradients:
    """Accumulators; d W2 in float32 because many small chunks add into it."""

    def __init__(self, draft: DraftRows) -> None:
        self.hidden = torch.empty_like(draft.hidden_RD)
        self.features = None if draft.features_RM is None else torch.empty_like(draft.features_RM)
        shape = (0,) if draft.w2_VM is None else draft.w2_VM.shape
        self.w2 = draft.hidden_RD.new_zeros(shape, dtype=torch.float32)


def _chunks(row_of_slot: Tensor, rows_per_chunk: int) -> list[_Chunk]:
    """Cut sorted slots into chunks of at most rows_per_chunk, never inside the slots of one target row.

    A single target row with more slots than rows_per_chunk (at most γ) becomes a chunk of its own.
    """
    counts = torch.bincount(row_of_slot).tolist()
    chunks: list[_Chunk] = []
    start = stop = first_row = 0
    for row, count in enumerate(counts):
        if stop > start and stop + count - start > rows_per_chunk:
            chunks.append(_Chunk(start, stop, first_row, row))
            start, first_row = stop, row
        stop += count
    return [*chunks, _Chunk(start, stop, first_row, len(counts))]


def _run_chunk(
    chunk: _Chunk, draft: DraftRows, job: _Job, losses: tuple[Tensor, Tensor], grads: _Gradients | None
) -> None:
    slots, head = job.order[chunk.start : chunk.stop], job.heads.lm_head_VD
    logits = draft.hidden_RD[slots].to(head.dtype) @ head.T
    features = None
    if draft.features_RM is not None and draft.w2_VM is not None:
        features = draft.features_RM[slots]
        logits = logits.to(features.dtype).addmm_(features, draft.w2_VM.T)
    target_logits = job.heads.logits(job.target.last_hidden_UD[chunk.first_row : chunk.last_row])
    local_rows = job.target.row_of_slot[slots] - chunk.first_row
    for part in _chunks(local_rows, len(slots) if logits.is_cuda else _CPU_ROWS_IN_CACHE):
        inside = slice(part.start, part.stop)
        p = torch.softmax(target_logits[part.first_row : part.last_row], dim=-1, dtype=torch.float32)
        ce, l1 = _row_losses(logits[inside], p[local_rows[inside] - part.first_row], slots[inside], job)
        losses[0][slots[inside]], losses[1][slots[inside]] = ce, l1
    if grads is None:
        return
    grads.hidden[slots] = (logits.to(head.dtype) @ head).to(grads.hidden.dtype)
    if features is not None and grads.features is not None and draft.w2_VM is not None:
        grads.features[slots] = logits @ draft.w2_VM
        grads.w2 += logits.T @ features


def _row_losses(logits: Tensor, p: Tensor, slots: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
    """CE and L1 of some rows; with gradients the logits are overwritten by dL/dz. p is overwritten in any case."""
    labels, weights, terms = job.target.labels[slots], job.target.weights[slots], job.terms
    q = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    ce = -q.gather(-1, labels[:, None]).squeeze(-1)
    q.exp_()
    difference = torch.sub(q, p, out=p)
    l1 = torch.linalg.vector_norm(difference, ord=1, dim=-1)
    if job.with_gradient:
        # s ⊙ q in one pass; where q equals p to the last bit the sign is +1 instead of 0, a subgradient as well.
        signed_q = torch.copysign(q, difference, out=difference)
        mean_sign = signed_q.sum(dim=-1)
        q.mul_((weights * (terms.ce - terms.l1 * mean_sign))[:, None])
        q.addcmul_(signed_q, (weights * terms.l1)[:, None])
        q.scatter_add_(-1, labels[:, None], (-terms.ce * weights)[:, None])
        logits.copy_(q)
    return ce, l1
