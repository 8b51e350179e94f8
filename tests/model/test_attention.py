from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.attention import (
    QUERIES_PER_CALL,
    BlockLayout,
    block_attention,
    plan_groups,
    reference_attention,
)

S, H, G, E = 3, 4, 2, 8
COLUMNS = 20
Place = tuple[int, int, int]


def layout_of(places: list[Place], **settings: Any) -> BlockLayout:
    """Blocks at (row, document start, anchor column)."""
    rows, starts, anchors = torch.tensor(places, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return BlockLayout(
        **{"num_queries": S, "num_slots": S, "rows": rows, "starts": starts, "anchors": anchors} | settings
    )


def in_one_row(anchors: list[int], **settings: Any) -> BlockLayout:
    return layout_of([(0, 0, anchor) for anchor in anchors], **settings)


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    """Any anchors in any order, in documents that begin at columns 0, 5 and 11 of three rows; with or without window.

    EAGLE-3's shape too: one query over any number of slots, even none.
    """
    places = []
    for row, anchor in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, COLUMNS - 1)), max_size=45)):
        places.append((row, max(start for start in (0, 5, 11) if start <= anchor), anchor))
    if draw(st.booleans()):
        return layout_of(places, window=draw(st.sampled_from([None, 1, 2, 3, 6, 40])))
    # A query must see something: its own slot, or context.
    places = [(row, start, anchor) for row, start, anchor in places if anchor > start]
    return layout_of(places, num_queries=1, num_slots=draw(st.integers(0, 4)))


def random_inputs(
    layout: BlockLayout, batch: int = 3, length: int = COLUMNS
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    count = len(layout.rows)
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    block = (draw(count, layout.num_slots, G, E), draw(count, layout.num_slots, G, E))
    return draw(count, layout.num_queries, H, E), block, (draw(batch, length, G, E), draw(batch, length, G, E))


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_groups_equal_the_formula(layout: BlockLayout) -> None:
    query, block, context = random_inputs(layout)
    fast = block_attention(query, block, context, plan_groups(layout))
    slow = reference_attention(query, block, context, layout)
    assert fast.shape == (len(layout.rows), layout.num_queries, H, E)
    assert torch.allclose(fast, slow, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_equal_the_formula(window: int | None) -> None:
    layout = in_one_row(list(range(20)), window=window)
    query, block, context = random_inputs(layout, batch=1)
    leaves = [query, *block, *context]
    for leaf in leaves:
        leaf.requires_grad_(True)
    weight = torch.randn(20, S, H, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fast = block_attention(query, block, context, plan_groups(layout))
    slow = reference_attention(query, block, context, layout)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), leaves),
        torch.autograd.grad((slow * weight).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 2, 2)], ids=["row", "document"])
def test_an_anchor_without_context_sees_its_own_slots_only(place: Place) -> None:
    layout = layout_of([place])
    query, block, context = random_inputs(layout, batch=1, length=4)
    out = block_attention(query, block, context, plan_groups(layout))
    poisoned = (torch.full_like(context[0], torch.nan), torch.full_like(context[1], torch.nan))
    assert torch.isfinite(out).all()
    assert torch.equal(out, block_attention(query, block, poisoned, plan_groups(layout)))


@pytest.mark.parametrize("window", [None, 5])
def test_context_at_or_after_the_anchor_never_matters(window: int | None) -> None:
    """E1: also with many blocks in one call, and for what a neighbouring document holds."""
    layout = layout_of([(0, 4, anchor) for anchor in range(4, 12)], window=window)
    query, block, context = random_inputs(layout, batch=1, length=16)
    expected = block_attention(query, block, context, plan_groups(layout))
    for column in range(16):
        changed = tuple(x.clone() for x in context)
        for x in changed:
            x[:, column] += 1e3
        out = block_attention(query, block, (changed[0], changed[1]), plan_groups(layout))
        same = [bool(torch.equal(out[i], expected[i])) for i in range(8)]
        reach = 99 if window is None else window - 1
        assert same == [not (4 <= column < anchor and anchor - column <= reach) for anchor in range(4, 12)]


@pytest.mark.parametrize("blocks_per_call", [QUERIES_PER_CALL // S])
@pytest.mark.parametrize("calls", [0, 1, 5])
def test_cost_is_linear_in_the_slots(blocks_per_call: int, calls: int) -> None:
    count = calls * blocks_per_call + 1
    layout = in_one_row(list(range(count)))
    groups = plan_groups(layout)
    assert sorted(torch.cat([g.blocks for g in groups]).tolist()) == list(range(count))
    scores = sum(g.visible.numel() for g in groups)
    assert scores <= count * S * (count + QUERIES_PER_CALL), "slots x (context + a constant), not slots squared"
    assert all(g.context.stop == int(layout.anchors[g.blocks].max()) for g in groups)
    narrow = plan_groups(dataclasses.replace(layout, window=7))
    assert all(g.context.stop - g.context.start <= blocks_per_call + 7 for g in narrow)
