"""Context + block attention of training (DSpark §3.1, DFlash §3), at a cost of O(slots · (context + block)).

A block sees context rows strictly before its anchor and, in both directions, its own slots; never another block.
Legend: T context rows, A blocks, S slots per block, H query heads, G key/value heads, E head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Blocks that share one attention call. Their slots are each other's (masked) keys, so the waste is
# BLOCKS_PER_CALL * S columns beside the context; fewer blocks make calls too small to be fast.
BLOCKS_PER_CALL = 16


class AttentionGroup(NamedTuple):
    """Blocks of one sample with neighbouring anchors, attended in one call."""

    row: int
    """Row of the batch."""
    context_length: int
    """Context rows that any of the blocks sees: the largest anchor."""
    blocks: Tensor
    """int64 [n]: indices of the blocks."""
    visible: Tensor
    """bool [n*S, context_length + n*S]: may query slot q see key j (context, then the group's slots)."""


def plan_groups(rows: Tensor, anchors: Tensor, num_slots: int) -> list[AttentionGroup]:
    """Group blocks by sample and neighbouring anchors; rows and anchors are int64 [A] in any order.

    One plan serves all layers. Sorting by anchor lets a call stop at its own largest anchor instead of reading the
    whole context, and makes the result independent of the order of the blocks.
    """
    device = anchors.device
    places = zip(rows.tolist(), anchors.tolist(), strict=True)
    keys = [(row, anchor, index) for index, (row, anchor) in enumerate(places)]
    groups: list[AttentionGroup] = []
    pending: list[tuple[int, int, int]] = []
    for key in [*sorted(keys), None]:
        full = len(pending) == BLOCKS_PER_CALL
        if pending and (key is None or full or key[0] != pending[0][0]):
            groups.append(_make_group(pending, num_slots, device))
            pending = []
        if key is not None:
            pending.append(key)
    return groups


def _make_group(keys: list[tuple[int, int, int]], num_slots: int, device: torch.device) -> AttentionGroup:
    anchors = torch.tensor([anchor for _, anchor, _ in keys], device=device)
    context_length = keys[-1][1]
    block_of_slot = torch.arange(len(keys), device=device).repeat_interleave(num_slots)
    sees_context = torch.arange(context_length, device=device) < anchors[block_of_slot][:, None]
    sees_slot = block_of_slot[:, None] == block_of_slot
    indices = torch.tensor([index for _, _, index in keys], device=device)
    return AttentionGroup(keys[0][0], context_length, indices, torch.cat([sees_context, sees_slot], dim=1))


def block_attention(
    query_ASHE: Tensor, block_kv: tuple[Tensor, Tensor], context_kv: tuple[Tensor, Tensor], groups: list[AttentionGroup]
) -> Tensor:
    """Attention output [A, S, H, E] of every block.

    block_kv are keys and values [A, S, G, E], context_kv [B, T, G, E], all rotated. Each call handles one group; query
    heads that share a key head are laid side by side as queries, so keys are never repeated.
    """
    _, S, H, E = query_ASHE.shape
    G = block_kv[0].shape[2]
    if not groups:
        return query_ASHE.new_zeros(query_ASHE.shape)
    outputs = []
    for group in groups:
        n = len(group.blocks)
        # [n,S,H,E] -> [G, (H/G)*n*S, E]
        query = query_ASHE[group.blocks].view(n * S, G, H // G, E).permute(1, 2, 0, 3).reshape(G, -1, E)
        key, value = (
            torch.cat(
                [context[group.row, : group.context_length], block[group.blocks].view(n * S, G, E)], dim=0
            ).transpose(0, 1)
            for context, block in zip(context_kv, block_kv, strict=True)
        )
        visible = group.visible.repeat(H // G, 1)
        out = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=visible)
        outputs.append(out.view(G, H // G, n, S, E).permute(2, 3, 0, 1, 4).reshape(n, S, H, E))
    order = torch.cat([group.blocks for group in groups])
    return torch.cat(outputs)[torch.argsort(order)]


def reference_attention(
    query_ASHE: Tensor,
    block_kv: tuple[Tensor, Tensor],
    context_kv: tuple[Tensor, Tensor],
    rows: Tensor,
    anchors: Tensor,
) -> Tensor:
    """The same, block by block and written as the formula: what every faster implementation is tested against."""
    _, _, H, E = query_ASHE.shape
    repeats = H // block_kv[0].shape[2]
    outputs = []
    for index, (row, anchor) in enumerate(zip(rows.tolist(), anchors.tolist(), strict=True)):
        key, value = (
            torch.cat([context[row, :anchor], block[index]]).repeat_interleave(repeats, dim=1)
            for context, block in zip(context_kv, block_kv, strict=True)
        )
        scores = torch.einsum("she,jhe->hsj", query_ASHE[index], key) / E**0.5
        outputs.append(torch.einsum("hsj,jhe->she", scores.softmax(dim=-1), value))
    return torch.stack(outputs) if outputs else query_ASHE.new_zeros(query_ASHE.shape)


def cached_attention(query_SHE: Tensor, key_JGE: Tensor, value_JGE: Tensor) -> Tensor:
    """One block over keys it may all see (decoding): [S, H, E] from context and block keys [J, G, E]."""
    S, H, E = query_SHE.shape
    G = key_JGE.shape[1]
    query = query_SHE.view(S, G, H // G, E).permute(1, 2, 0, 3).reshape(G, -1, E)
    key, value = key_JGE.transpose(0, 1), value_JGE.transpose(0, 1)
    out = F.scaled_dot_product_attention(query[None], key[None], value[None])
    return out.view(G, H // G, S, E).permute(2, 0, 1, 3).reshape(S, H, E)
