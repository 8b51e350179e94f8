# mypy: disallow-untyped-defs=False
"""The row-wise part of the loss in Triton: the same values and gradients as row_loss.row_losses, for CUDA devices.

One program per draft row makes three sweeps over its logits: log Σ exp; then CE, L1 and <s, q>; then dL/dz, written
over the logits. The target's log Σ exp is computed once per target row by a kernel of its own, so its probabilities
never lie in memory. All arithmetic is float32. Imported only where it runs (chunked_loss.py); under
TRITON_INTERPRET=1 it runs on CPU tensors, which is how it is tested without a GPU. No figure of a real GPU exists yet:
`python benchmarks/train_step.py --gpu` makes them. Legend: n slots, u target rows, W columns, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.row_loss import ChunkLogits, ChunkSlots, RowTerms

# Columns per step of a sweep: 112 registers a thread on sm_90, nothing spilt (ptxas -v), so two programs share an SM.
_BLOCK = 4096
_WARPS = 8


def kernel_row_losses(
    logits: ChunkLogits, slots: ChunkSlots, terms: RowTerms, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """See row_loss.row_losses; float32, bf16 or fp16 logits."""
    draft, bias, target = logits.draft_nW, logits.bias_uW, logits.target_uV
    slot_count, columns = draft.shape
    ce, l1 = (torch.empty(slot_count, dtype=torch.float32, device=draft.device) for _ in range(2))
    if slot_count == 0:
        return ce, l1
    target_lse = torch.empty(len(target), dtype=torch.float32, device=draft.device)
    _log_sum_exp[(len(target),)](target, target_lse, target.shape[1], BLOCK=_block(target.shape[1]), num_warps=_WARPS)
    if logits.columns_W is not None:
        target = target[:, logits.columns_W]
    _draft_rows[(slot_count,)](
        draft,
        draft if bias is None else bias,
        target,
        target_lse,
        slots.row_of_slot,
        slots.labels,
        slots.weights,
        ce,
        l1,
        terms.ce,
        terms.l1,
        columns,
        HAS_BIAS=bias is not None,
        REDUCED=logits.columns_W is not None,
        GRADIENT=gradient,
        BLOCK=_block(columns),
        num_warps=_WARPS,
    )
    if gradient and bias is not None:
        edges = torch.arange(len(bias) + 1, device=bias.device)
        starts = torch.searchsorted(slots.row_of_slot, edges)
        block = _block(columns)
        _sum_groups[(len(bias), triton.cdiv(columns, block))](
            draft, starts, bias, columns, BLOCK=block, num_warps=_WARPS
        )
    return ce, l1


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(columns))


@triton.jit
def _fold(largest, total, x):
    """Fold the values x into a running maximum and the sum of exp(value - maximum)."""
    new = tl.maximum(largest, tl.max(x, 0))
    return new, total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)


@triton.jit
def _log_sum_exp(logits, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = float("-inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        largest, total = _fold(largest, total, x)
    tl.store(out + row, largest + tl.log(total))


@triton.jit
def _logits_at(draft_row, bias_row, at, inside, HAS_BIAS: tl.constexpr):
    z = tl.load(draft_row + at, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_row + at, mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def _target_at(target_row, at, inside, target_total):
    """p at some columns, 0 outside."""
    return tl.exp(tl.load(target_row + at, mask=inside, other=float("-inf")).to(tl.float32) - target_total)


@triton.jit
def _draft_rows(  # noqa: PLR0913, PLR0917 - a kernel takes pointers, not objects
    draft,
    bias,
    target,
    target_lse,
    row_of_slot,
    labels,
    weights,
    ce_out,
    l1_out,
    ce_weight,
    l1_weight,
    columns,
    HAS_BIAS: tl.constexpr,
    REDUCED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    u = tl.load(row_of_slot + slot).to(tl.int64)
    draft_row, bias_row, target_row = draft + slot * columns, bias + u * columns, target + u * columns

    largest = float("-inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        largest, total = _fold(largest, total, _logits_at(draft_row, bias_row, at, at < columns, HAS_BIAS))
    draft_total = largest + tl.log(total)
    target_total = tl.load(target_lse + u)
    label = tl.load(labels + slot)
    has_label = label >= 0
    of_label = _logits_at(draft_row, bias_row, tl.maximum(label, 0), has_label, HAS_BIAS)
    tl.store(ce_out + slot, tl.where(has_label, draft_total - of_label, 0.0))

    distance = tl.zeros((BLOCK,), tl.float32)
    signed = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        q = tl.exp(_logits_at(draft_row, bias_row, at, at < columns, HAS_BIAS) - draft_total)
        p = _target_at(target_row, at, at < columns, target_total)
        distance += tl.abs(q - p)
        signed += tl.where(q >= p, q, -q)
        mass += p
    l1 = tl.sum(distance, 0)
    if REDUCED:
        l1 += tl.maximum(1.0 - tl.sum(mass, 0), 0.0)
    tl.store(l1_out + slot, l1)

    if GRADIENT:
        label_weight = tl.where(has_label, tl.load(weights + slot) * ce_weight, 0.0)
        sign_weight = tl.load(weights + slot) * l1_weight
        q_weight = label_weight - sign_weight * tl.sum(signed, 0)
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            q = tl.exp(_logits_at(draft_row, bias_row, at, at < columns, HAS_BIAS) - draft_total)
            p = _target_at(target_row, at, at < columns, target_total)
            gradient = q * (q_weight + tl.where(q >= p, sign_weight, -sign_weight))
            gradient -= tl.where(at == label, label_weight, 0.0)
            tl.store(draft_row + at, gradient.to(draft.dtype.element_ty), mask=at < columns)


@triton.jit
def _sum_groups(gradient, starts, out, columns, BLOCK: tl.constexpr):
    """out[u] = Σ of the gradient rows starts[u] .. starts[u + 1] - 1."""
    u = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.load(starts + u), tl.load(starts + u + 1)):
        total += tl.load(gradient + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + u * columns + at, total.to(out.dtype.element_ty), mask=inside)
