"""The attention of attention.py by FlexAttention, for GPUs, and the choice between the two.

What a query sees is two intervals of one key axis, on which the columns of all rows come first and the slots of all
blocks follow: [document start or window, anchor) of its row, and its own block. Both the mask and the table of tiles
that hold anything visible follow from these intervals, so nothing of size queries · keys is ever made.
Legend: as attention.py; N queries and M keys on their flat axes, padded to whole tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.attention import BlockLayout, block_attention, plan_groups

TILE = 128
KeyValue = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, KeyValue, KeyValue], Tensor]
"""(queries [A,Q,H,E], block keys and values [A,S,G,E], context keys and values [B,T,G,E]) -> [A,Q,H,E]."""


def plan_attention(layout: BlockLayout, context_shape: tuple[int, int]) -> Attend:
    """The attention of one micro-batch with (rows, columns) of context: FlexAttention on a GPU, else by groups."""
    if layout.anchors.is_cuda and len(layout.anchors):
        return FlexPlan(layout, context_shape, compiled=True)
    groups = plan_groups(layout)
    return lambda query, block_kv, context_kv: block_attention(query, block_kv, context_kv, groups)


class FlexPlan:
    """The block mask of one layout. `compiled` false runs the same mask without a compiler, densely, for tests."""

    def __init__(self, layout: BlockLayout, context_shape: tuple[int, int], *, compiled: bool) -> None:
        self._attention = _compiled_attention() if compiled else cast(Callable[..., Any], flex_attention)
        # Neighbouring queries should share tiles; ties do not matter.
        keys = (layout.rows * (context_shape[1] + 1) + layout.starts) * (context_shape[1] + 1) + layout.anchors
        self._order = torch.argsort(keys)
        self._back = torch.argsort(self._order)
        self._num_keys = context_shape[0] * context_shape[1] + len(layout.rows) * layout.num_slots
        self.intervals = _intervals(layout, self._order, context_shape)
        self.mask = _block_mask(self.intervals, -(-self._num_keys // TILE) * TILE)

    def __call__(self, query_AQHE: Tensor, block_kv: KeyValue, context_kv: KeyValue) -> Tensor:
        """See Attend."""
        A, Q, H, E = query_AQHE.shape
        query_NHE = query_AQHE[self._order].flatten(0, 1)
        padded = _pad(query_NHE, len(self.intervals[0]))
        key, value = (
            _pad(torch.cat([context.flatten(0, 1), block[self._order].flatten(0, 1)]), self.mask.seq_lengths[1])
            for context, block in zip(context_kv, block_kv, strict=True)
        )
        # [N, H, E] -> [1, H, N, E]
        heads_first = (x.transpose(0, 1)[None] for x in (padded, key, value))
        out = self._attention(*heads_first, block_mask=self.mask, enable_gqa=True)
        return out[0, :, : A * Q].transpose(0, 1).reshape(A, Q, H, E)[self._back]


@functools.cache
def _compiled_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def _intervals(layout: BlockLayout, order: Tensor, context_shape: tuple[int, int]) -> Tensor:
    """int64 [4, N]: first and end of the visible context columns, first and end of the visible slots, per query.

    Queries that only fill the last tile see nothing.
    """
    num_rows, num_columns = context_shape
    Q, S = layout.num_queries, layout.num_slots
    rows, starts, anchors = (x[order, None] for x in (layout.rows, layout.starts, layout.anchors))
    offsets = torch.arange(Q, device=anchors.device)
    first, end = starts.expand(-1, Q), anchors.expand(-1, Q)
    first_slot, end_slot = torch.zeros_like(offsets), torch.full_like(offsets, S)
    if layout.window is not None:
        first = torch.maximum(first, anchors + offsets - layout.window + 1)
        first_slot, end_slot = (offsets - layout.window + 1).clamp(min=0), (offsets + layout.window).clamp(max=S)
    base = rows * num_columns
    block = num_rows * num_columns + torch.arange(len(order), device=anchors.device)[:, None] * S
    flat = torch.stack([(base + first), (base + end), block + first_slot, block + end_slot]).flatten(1)
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % TILE))


def _block_mask(intervals_4N: Tensor, num_keys: int) -> BlockMask:
    first, end, first_slot, end_slot = intervals_4N

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= first[query]) & (key < end[query])
        return in_context | ((key >= first_slot[query]) & (key < end_slot[query]))

    touched, full = _tiles(intervals_4N, num_keys)
    partial_count, partial_index = _tile_lists(touched & ~full)
    full_count, full_index = _tile_lists(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(intervals_4N.shape[1], num_keys),
    )


def _tiles(intervals_4N: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """bool [query tiles, key tiles] twice: some query of the tile sees a key of it; every query sees every key."""
    query_tiles, key_tiles = intervals_4N.shape[1] // TILE, num_keys // TILE
    tile_of_query = torch.arange(intervals_4N.shape[1], device=intervals_4N.device) // TILE
    seeing = torch.zeros(query_tiles, key_tiles + 1, dtype=torch.int64, device=intervals_4N.device)
    covering = torch.zeros_like(seeing)
    for first, end in (intervals_4N[:2], intervals_4N[2:]):
        some = end > first
        _count(seeing, tile_of_query[some], first[some] // TILE, -(-end[some] // TILE))
        whole_first, whole_end = -(-first // TILE), end // TILE
        all_of_it = whole_end > whole_first
        _count(covering, tile_of_query[all_of_it], whole_first[all_of_it], whole_end[all_of_it])
    return seeing.cumsum(1)[:, :-1] > 0, covering.cumsum(1)[:, :-1] == TILE


def _count(changes: Tensor, rows: Tensor, first: Tensor, end: Tensor) -> None:
    """Add one to [first, end) of each row, as differences."""
    one = torch.ones_like(rows)
    changes.index_put_((rows, first), one, accumulate=True)
    changes.index_put_((rows, end), -one, accumulate=True)


def _tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [1, 1, query tiles] counts and [1, 1, query tiles, key tiles] indices, the chosen ones first."""
    order = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True)
    return tiles.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


def _pad(x: Tensor, length: int) -> Tensor:
    """Zeros after the first axis."""
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])
