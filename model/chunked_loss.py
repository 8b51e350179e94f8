"""lm_head + Markov bias + softmax + CE + L1 in chunks, with the gradient computed in the forward pass.

The loss and its gradient with respect to the logits are row-wise (row_loss.py), and the lm_head is frozen, so a chunk
of [rows, V] logits is turned at once into d hidden, d features and d W2 and then forgotten (design: loss, facts a, b).
The slots are ordered by target row, the position that predicts their label. Two things are the same for all slots of a
target row and so are computed once for it: the target's distribution, and, when features depend on the previous token
alone, the Markov bias and its gradient; the previous token stands at that very position.
Legend: R supervised slots, U distinct target rows, W draft vocabulary, V vocabulary, D hidden, M Markov rank.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from model.row_loss import ChunkLogits, ChunkSlots, RowTerms, compute_dtype, row_losses
from model.target_heads import TargetHeads

_W2_ROWS_PER_SUM = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTargets:
    """What the supervised slots are compared with, and how much each counts."""

    last_hidden_UD: Tensor
    """The target's last hidden state at the distinct rows that predict a label."""
    row_of_slot: Tensor
    """int64 [R]: which of the U rows holds the slot's target distribution. Each row has a slot."""
    labels: Tensor
    """int64 [R]: target token ids."""
    weights: Tensor
    """float32 [R]."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRows:
    """The drafter's side: logits = lm_head(hidden) + W2 features; features and W2 are None without a Markov head."""

    hidden_RD: Tensor
    features: Tensor | None
    """[R, M], one per slot; or [U, M], one per target row, when all slots of a target row have the same."""
    w2_WM: Tensor | None
    shared_features: bool = False
    """Whether features are [U, M]."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Slots of the sorted order, and the target rows they use."""

    slots: slice
    rows: slice
    counts: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Everything the autograd function needs that is not differentiated; slots sorted by target row."""

    target: SlotTargets
    columns_W: Tensor | None
    heads: TargetHeads
    terms: RowTerms
    with_gradient: bool


def chunked_rows(
    draft: DraftRows, target: SlotTargets, heads: TargetHeads, terms: RowTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """(CE [R], L1 [R], Σ w·(ce·CE + l1·L1)) in float32; only the last is differentiable, once.

    hidden and features may be bf16: matrix products run in their dtype, softmax and losses in float32. With a reduced
    draft vocabulary L1 covers the whole of the target's, and CE is 0 for a label that cannot be drafted.
    """
    order = torch.argsort(target.row_of_slot, stable=True)
    ordered = SlotTargets(
        last_hidden_UD=target.last_hidden_UD,
        row_of_slot=target.row_of_slot[order],
        labels=draft_labels(target.labels, heads)[order],
        weights=target.weights[order],
    )
    job = _Job(ordered, heads.draft_ids, heads, terms, torch.is_grad_enabled())
    features = draft.features
    if features is not None and not draft.shared_features:
        features = features[order]
    ce, l1, objective = _ChunkedRows.apply(draft.hidden_RD[order], features, draft.w2_WM, draft.shared_features, job)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return ce[back], l1[back], objective


def draft_labels(labels: Tensor, heads: TargetHeads) -> Tensor:
    """Target token ids [...] to draft token ids, -1 where the draft vocabulary lacks the token."""
    if heads.draft_ids is None:
        return labels
    draft_of_target = labels.new_full((len(heads.lm_head_VD),), -1)
    draft_of_target[heads.draft_ids] = torch.arange(len(heads.draft_ids), device=labels.device)
    return draft_of_target[labels]


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, features: Tensor | None, w2: Tensor | None, shared: bool, job: _Job
    ) -> tuple[Tensor, Tensor, Tensor]:
        draft = DraftRows(hidden, features, w2, shared)
        grads = _Gradients(draft) if job.with_gradient else None
        dtype = compute_dtype(hidden)
        ce, l1 = hidden.new_empty(len(hidden), dtype=dtype), hidden.new_empty(len(hidden), dtype=dtype)
        chunks = list(_chunks(job.target.row_of_slot, job.terms.rows_per_chunk))
        # One buffer for all chunks: fresh memory costs a CPU more than filling it.
        height = max(chunk.slots.stop - chunk.slots.start for chunk in chunks)
        head = job.heads.draft_head_VD
        buffer = head.new_empty(height, len(head))
        for chunk in chunks:
            ce[chunk.slots], l1[chunk.slots] = _run_chunk(chunk, draft, job, buffer, grads)
        objective = (job.target.weights * (job.terms.ce * ce + job.terms.l1 * l1)).sum()
        ctx.mark_non_differentiable(ce, l1)
        ctx.gradients = grads
        return ce, l1, objective

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients exist already: they are scaled where they lie and handed over, so there is no second copy.
        grads, ctx.gradients = ctx.gradients, None
        if grads is None:
            raise RuntimeError(
                "the chunked loss was differentiated twice; its gradients were handed over the first time"
            )
        return *grads.scaled(grad_outputs[2]), None, None


class _Gradients:
    """Accumulators; d W2 in float32 because many chunks add into it."""

    def __init__(self, draft: DraftRows) -> None:
        self.hidden = torch.empty_like(draft.hidden_RD)
        self.features = None if draft.features is None else torch.empty_like(draft.features)
        self.w2: Tensor | None = None
        self._w2_dtype = None if draft.w2_WM is None else draft.w2_WM.dtype
        if draft.w2_WM is not None:
            self.w2 = torch.zeros_like(draft.w2_WM, dtype=compute_dtype(draft.w2_WM))

    def add_w2(self, dz_nW: Tensor, features_nM: Tensor) -> None:
        """W2 gradient of some rows."""
        assert self.w2 is not None
        if dz_nW.dtype == self.w2.dtype:
            self.w2.addmm_(dz_nW.T, features_nM)
            return
        # In pieces: a CPU first makes a float32 copy of what it adds, and large copies are fresh memory every time.
        step = len(self.w2) if self.w2.is_cuda else _W2_ROWS_PER_SUM
        for first in range(0, len(self.w2), step):
            self.w2[first : first + step] += dz_nW[:, first : first + step].T @ features_nM

    def scaled(self, scale: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All three times the incoming gradient, in the dtypes of their inputs."""
        for gradient in (self.hidden, self.features, self.w2):
            if gradient is not None:
                gradient.mul_(scale.to(gradient.dtype))
        return self.hidden, self.features, None if self.w2 is None else self.w2.to(self._w2_dtype)


def _chunks(row_of_slot: Tensor, rows_per_chunk: int) -> Iterator[_Chunk]:
    """Cut sorted slots into chunks of at most rows_per_chunk (RowTerms), never inside the slots of one target row.

    A single target row with more slots than fit (there are at most γ) becomes a chunk of its own.
    """
    counts = torch.bincount(row_of_slot).tolist()
    start = stop = first_row = 0
    for row, count in enumerate(counts):
        if stop > start and stop + count - start + 2 * (row + 1 - first_row) > rows_per_chunk:
            yield _Chunk(slice(start, stop), slice(first_row, row), counts[first_row:row])
            start, first_row = stop, row
        stop += count
    yield _Chunk(slice(start, stop), slice(first_row, len(counts)), counts[first_row:])


def _run_chunk(
    chunk: _Chunk, draft: DraftRows, job: _Job, buffer: Tensor, grads: _Gradients | None
) -> tuple[Tensor, Tensor]:
    """CE and L1 of the chunk's slots, with `buffer` for logits; its share of the gradients goes into `grads`."""
    target, head, w2 = job.target, job.heads.draft_head_VD, draft.w2_WM
    hidden = draft.hidden_RD[chunk.slots].to(head.dtype)
    logits = torch.mm(hidden, head.T, out=buffer[: len(hidden)])
    features = bias = None
    if draft.features is not None and w2 is not None:
        features = draft.features[chunk.rows if draft.shared_features else chunk.slots]
        logits = logits.to(features.dtype)
        if draft.shared_features:
            bias = features @ w2.T
        else:
            logits.addmm_(features, w2.T)
    ce, l1 = _row_function(logits)(
        ChunkLogits(logits, bias, job.heads.logits(target.last_hidden_UD[chunk.rows]), job.columns_W),
        ChunkSlots(
            row_of_slot=target.row_of_slot[chunk.slots] - chunk.rows.start,
            counts=chunk.counts,
            labels=target.labels[chunk.slots],
            weights=target.weights[chunk.slots],
        ),
        job.terms,
        gradient=grads is not None,
    )
    if grads is not None:
        grads.hidden[chunk.slots] = logits.to(head.dtype) @ head
        if features is not None and grads.features is not None and w2 is not None:
            dz = logits if bias is None else bias
            grads.features[chunk.rows if draft.shared_features else chunk.slots] = dz @ w2
            grads.add_w2(dz, features)
    return ce, l1


def _row_function(logits: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """The Triton kernel where it runs, else plain torch."""
    if not logits.is_cuda or logits.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return row_losses
    from model.loss_kernel import kernel_row_losses

    return kernel_row_losses
