"""Context + block attention of training (DSpark §3.1, DFlash §3), at a cost of O(slots · (context + block)).

A block sees the context rows of its own document strictly before its anchor and, in both directions, its own slots;
never another block. A sliding window w keeps of those the keys at positions j with |p - j| < w of the query's p.
Here in plain PyTorch; flex.py has the same for GPUs.
Legend: B rows, T columns, A blocks, Q queries and S key slots per block, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries that share an attention call. The slots of a call's blocks are each other's (masked) keys, so the waste is
# that many columns beside the context; fewer queries make calls too small to be fast.
QUERIES_PER_CALL = 112


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """Where the blocks of a micro-batch stand and what they may see."""

    rows: Tensor
    """int64 [A]: row of the batch."""
    starts: Tensor
    """int64 [A]: column where the block's document begins."""
    anchors: Tensor
    """int64 [A]: column of the anchor; query q stands at column anchor + q."""
    num_queries: int
    num_slots: int
    """Keys that a block brings; equal to num_queries except in EAGLE-3, where the one query sees all of them."""
    window: int | None = None
    """Sliding window in positions; None: no limit."""


class AttentionGroup(NamedTuple):
    """Blocks of one document with neighbouring anchors, attended in one call."""

    row: int
    """Row of the batch."""
    context: slice
    """Columns of the row that any of the blocks sees, up to the largest anchor."""
    blocks: Tensor
    """int64 [n]: indices of the blocks."""
    visible: Tensor
    """bool [n*Q, columns + n*S]: may query i see key j (context, then the group's slots)."""


def plan_groups(layout: BlockLayout) -> list[AttentionGroup]:
    """Group blocks by document and neighbouring anchors, whatever their order.

    One plan serves all layers with the same window. Sorting by anchor lets a call read its own part of the context
    alone, and makes the result independent of the order of the blocks.
    """
    places = zip(layout.rows.tolist(), layout.starts.tolist(), layout.anchors.tolist(), strict=True)
    keys = [(*place, index) for index, place in enumerate(places)]
    per_call = max(1, QUERIES_PER_CALL // layout.num_queries)
    groups: list[AttentionGroup] = []
    pending: list[tuple[int, int, int, int]] = []
    for key in [*sorted(keys), None]:
        full = len(pending) == per_call
        if pending and (key is None or full or key[:2] != pending[0][:2]):
            groups.append(_make_group(pending, layout))
            pending = []
        if key is not None:
            pending.append(key)
    return groups


def _make_group(keys: list[tuple[int, int, int, int]], layout: BlockLayout) -> AttentionGroup:
    device, window = layout.anchors.device, layout.window
    row, start, first_anchor, _ = keys[0]
    if window is not None:
        start = max(start, min(first_anchor, first_anchor - window + 1))
    anchors = torch.tensor([anchor for _, _, anchor, _ in keys], device=device)
    block_of_query = torch.arange(len(keys), device=device).repeat_interleave(layout.num_queries)
    block_of_slot = torch.arange(len(keys), device=device).repeat_interleave(layout.num_slots)
    columns = torch.arange(start, keys[-1][2], device=device)
    sees_context = columns < anchors[block_of_query][:, None]
    sees_slot = block_of_query[:, None] == block_of_slot
    if window is not None:
        offset = torch.arange(layout.num_queries, device=device).repeat(len(keys))[:, None]
        sees_context &= columns > anchors[block_of_query][:, None] + offset - window
        sees_slot &= (offset - torch.arange(layout.num_slots, device=device).repeat(len(keys))).abs() < window
    indices = torch.tensor([index for *_, index in keys], device=device)
    return AttentionGroup(row, slice(start, keys[-1][2]), indices, torch.cat([sees_context, sees_slot], dim=1))


def block_attention(
    query_AQHE: Tensor, block_kv: tuple[Tensor, Tensor], context_kv: tuple[Tensor, Tensor], groups: list[AttentionGroup]
) -> Tensor:
    """Attention output [A, Q, H, E] of every block.

    block_kv are keys and values [A, S, G, E], context_kv [B, T, G, E], all rotated. Each call handles one group; query
    heads that share a key head are laid side by side as queries, so keys are never repeated.
    """
    _, Q, H, E = query_AQHE.shape
    G = block_kv[0].shape[2]
    if not groups:
        return query_AQHE.new_zeros(query_AQHE.shape)
    # Sorted once and split: indexing per group would cost a zero tensor of all blocks per group in backward.
    order, sizes = torch.cat([group.blocks for group in groups]), [len(group.blocks) for group in groups]
    parts = (x.index_select(0, order).split(sizes) for x in (query_AQHE, *block_kv))
    outputs = []
    for group, n, query_nQHE, *block_kv_nSGE in zip(groups, sizes, *parts, strict=True):
        # [n,Q,H,E] -> [G, (H/G)*n*Q, E]
        query = query_nQHE.reshape(n * Q, G, H // G, E).permute(1, 2, 0, 3).reshape(G, -1, E)
        key, value = (
            torch.cat([context[group.row, group.context], block.flatten(0, 1)], dim=0).transpose(0, 1)
            for context, block in zip(context_kv, block_kv_nSGE, strict=True)
        )
        visible = group.visible.repeat(H // G, 1)
        out = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=visible)
        outputs.append(out.view(G, H // G, n, Q, E).permute(2, 3, 0, 1, 4).reshape(n, Q, H, E))
    return torch.cat(outputs).index_select(0, torch.argsort(order))


def reference_attention(
    query_AQHE: Tensor, block_kv: tuple[Tensor, Tensor], context_kv: tuple[Tensor, Tensor], layout: BlockLayout
) -> Tensor:
    """The same, query by query and written as the formula: what every faster implementation is tested against."""
    _, Q, H, E = query_AQHE.shape
    repeats, reach = H // block_kv[0].shape[2], layout.window or 2**62
    outputs = []
    places = zip(layout.rows.tolist(), layout.starts.tolist(), layout.anchors.tolist(), strict=True)
    for index, (row, start, anchor) in enumerate(places):
        for q in range(Q):
            first = max(start, anchor + q - reach + 1)
            near = [slot for slot in range(layout.num_slots) if abs(q - slot) < reach]
            key, value = (
                torch.cat([context[row, first:anchor], block[index, near]]).repeat_interleave(repeats, dim=1)
                for context, block in zip(context_kv, block_kv, strict=True)
            )
            scores = torch.einsum("he,jhe->hj", query_AQHE[index, q], key) / E**0.5
            outputs.append(torch.einsum("hj,jhe->he", scores.softmax(dim=-1), value))
    return torch.stack(outputs).view_as(query_AQHE) if outputs else query_AQHE.new_zeros(query_AQHE.shape)
