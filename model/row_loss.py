"""The row-wise part of the loss over one chunk of logits: CE, L1 and dL/dlogits, in plain torch, for every device.

With z = logits (+ the bias that the slots of one target row share), q = softmax(z), p the target's distribution,
s = sign(q - p), row weight w and c, l the weights of CE and L1 (DSpark §3.3):

    dL/dz = w · ( c · (q - onehot(label)) + l · q ⊙ (s - <s, q>) )

loss_kernel.py is the same in Triton. Legend: n slots, u target rows, W columns (the draft vocabulary), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Rows that share one pass of element-wise work; with two float32 scratch rows each they stay in a CPU's caches.
_ROWS_PER_PASS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSlots:
    """The slots of one chunk, those of one target row side by side, in the order of the target rows."""

    row_of_slot: Tensor
    """int64 [n], ascending from 0: the target row of each slot."""
    counts: list[int]
    """Slots of every target row."""
    labels: Tensor
    """int64 [n]: column of the label; -1 where the draft vocabulary lacks the token (then there is no CE)."""
    weights: Tensor
    """float32 [n]."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowTerms:
    """Weights of the two terms that need logits, and the size of a chunk."""

    ce: float
    l1: float
    rows_per_chunk: int
    """Rows of a whole vocabulary alive at a time: one for each slot, two for each target row (its logits, its bias)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLogits:
    """The [rows, columns] tensors of one chunk. Overwritten: see row_losses."""

    draft_nW: Tensor
    bias_uW: Tensor | None
    """Added to the logits of all slots of a target row; None without."""
    target_uV: Tensor
    """The target's logits."""
    columns_W: Tensor | None
    """int64: which of the target's V columns the draft vocabulary holds; None for all."""


def compute_dtype(logits: Tensor) -> torch.dtype:
    """dtype of softmax and losses: float32, or float64 when the logits are."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_losses(logits: ChunkLogits, slots: ChunkSlots, terms: RowTerms, *, gradient: bool) -> tuple[Tensor, Tensor]:
    """(CE [n], L1 [n]). With `gradient`, draft becomes dL/dz and bias its sum over the slots of each target row.

    L1 counts the target's mass outside the draft vocabulary too: serving verifies against all of it.
    """
    draft = logits.draft_nW
    dtype = compute_dtype(draft)
    slots = dataclasses.replace(slots, weights=slots.weights.to(dtype))
    ce, l1 = draft.new_empty(len(draft), dtype=dtype), draft.new_empty(len(draft), dtype=dtype)
    job = _Job(logits, slots, terms if gradient else None, (ce, l1))
    threads = 1 if draft.is_cuda else min(torch.get_num_threads(), len(slots.counts))
    if threads <= 1:
        _target_rows(job, range(len(slots.counts)))
        return ce, l1
    # Whole target rows per thread: thousands of small operations that each wait for all threads cost more than they
    # compute as soon as another process wants a core. torch's thread count is per thread, but for new threads global.
    before = torch.get_num_threads()
    edges = [len(slots.counts) * part // threads for part in range(threads + 1)]
    try:
        with ThreadPoolExecutor(threads, initializer=_use_one_thread) as pool:
            list(pool.map(lambda part: _target_rows(job, range(edges[part], edges[part + 1])), range(threads)))
    finally:
        torch.set_num_threads(before)
    return ce, l1


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of row_losses, and where CE and L1 go; terms are None without gradient."""

    logits: ChunkLogits
    slots: ChunkSlots
    terms: RowTerms | None
    results: tuple[Tensor, Tensor]


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # makes torch adopt the number in this thread now, before the global one changes back


def _target_rows(job: _Job, target_rows: range) -> None:
    """Some target rows of a chunk, with all their slots."""
    draft, bias, slots = job.logits.draft_nW, job.logits.bias_uW, job.slots
    ce, l1 = job.results
    height = min(_ROWS_PER_PASS, max(slots.counts, default=0))
    scratch = [draft.new_empty(height, draft.shape[1], dtype=ce.dtype) for _ in range(3)]
    start = sum(slots.counts[: target_rows.start])
    for u in target_rows:
        stop = start + slots.counts[u]
        p, outside = _target_probabilities(job.logits, u, ce.dtype)
        total = None
        for first in range(start, stop, _ROWS_PER_PASS):
            rows = slice(first, min(first + _ROWS_PER_PASS, stop))
            z, q, d = (buffer[: rows.stop - first] for buffer in scratch)
            z = draft[rows] if draft.dtype == ce.dtype else z.copy_(draft[rows])
            if bias is not None:
                z += bias[u]
            ce[rows], l1[rows] = _one_pass(z, p, (q, d), _Rows(slots, rows), job.terms)
            l1[rows] += outside
            if job.terms is not None and draft.dtype != ce.dtype:
                draft[rows] = z
            if job.terms is not None and bias is not None:
                total = z.sum(dim=0) if total is None else total + z.sum(dim=0)
        if total is not None and bias is not None:
            bias[u] = total
        start = stop


def _target_probabilities(logits: ChunkLogits, u: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """p of a target row on the draft vocabulary [W], and the mass outside it."""
    p = _exact_softmax(logits.target_uV[u].to(dtype), None)
    if logits.columns_W is None:
        return p, 0.0
    p = p[logits.columns_W]
    return p, (1.0 - p.sum()).clamp_min(0.0)


def _exact_softmax(z: Tensor, out: Tensor | None) -> Tensor:
    """softmax over the last axis, in z's dtype.

    On a CPU torch adds the exponentials up one after another, which at 151,936 columns is wrong by 1e-5 in float32;
    the pairwise sum of its result says by how much.
    """
    q = torch.softmax(z, dim=-1, out=out)
    return q.div_(q.sum(dim=-1, keepdim=True))


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Some slots of a chunk."""

    slots: ChunkSlots
    rows: slice

    @property
    def labels(self) -> Tensor:
        return self.slots.labels[self.rows, None]

    @property
    def weights(self) -> Tensor:
        return self.slots.weights[self.rows, None]


def _one_pass(
    z: Tensor, p: Tensor, scratch: tuple[Tensor, Tensor], rows: _Rows, terms: RowTerms | None
) -> tuple[Tensor, Tensor]:
    """CE and L1 of a few rows z [n, W] against p [W]; z becomes dL/dz when terms are given, else it is spoilt.

    Every line is one sweep over [n, W] (scratch rows are reused as soon as their content is spent).
    """
    has_label = rows.labels >= 0
    labels = rows.labels.clamp_min(0)
    largest, of_label = z.amax(dim=-1, keepdim=True), z.gather(-1, labels)
    q = _exact_softmax(z, scratch[0])
    # log Σ exp z, exact where q of the label underflows: the largest q is at least 1/W.
    ce = (largest - q.amax(dim=-1, keepdim=True).log() - of_label) * has_label
    difference = torch.sub(q, p, out=scratch[1])
    l1 = torch.abs(difference, out=z).sum(dim=-1)
    if terms is not None:
        # s ⊙ q in one sweep; where q equals p to the last bit the sign is +1 instead of 0, a subgradient as well.
        signed_q = torch.copysign(q, difference, out=difference)
        mean_sign = signed_q.sum(dim=-1, keepdim=True)
        ce_weight = rows.weights * terms.ce * has_label
        torch.mul(q, ce_weight - rows.weights * terms.l1 * mean_sign, out=z)
        z.addcmul_(signed_q, rows.weights * terms.l1)
        z.scatter_add_(-1, labels, -ce_weight)
    return ce.squeeze(-1), l1
