from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.attention import BLOCKS_PER_CALL, block_attention, cached_attention, plan_groups, reference_attention

S, H, G, E = 3, 4, 2, 8


def random_inputs(
    num_blocks: int, batch: int, length: int
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(num_blocks)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    block = (draw(num_blocks, S, G, E), draw(num_blocks, S, G, E))
    return draw(num_blocks, S, H, E), block, (draw(batch, length, G, E), draw(batch, length, G, E))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19)), min_size=0, max_size=45))
def test_groups_equal_the_formula_for_any_anchors_in_any_order(places: list[tuple[int, int]]) -> None:
    rows, anchors = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
    query, block, context = random_inputs(len(places), 3, 20)
    fast = block_attention(query, block, context, plan_groups(rows, anchors, S))
    slow = reference_attention(query, block, context, rows, anchors)
    assert fast.shape == (len(places), S, H, E)
    assert torch.allclose(fast, slow, atol=1e-12)


def test_gradients_equal_the_formula() -> None:
    anchors = torch.arange(20)
    rows = torch.zeros(20, dtype=torch.int64)
    query, block, context = random_inputs(20, 1, 20)
    leaves = [query, *block, *context]
    for leaf in leaves:
        leaf.requires_grad_(True)
    weight = torch.randn(20, S, H, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fast = block_attention(query, block, context, plan_groups(rows, anchors, S))
    slow = reference_attention(query, block, context, rows, anchors)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), leaves),
        torch.autograd.grad((slow * weight).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_an_anchor_without_context_sees_its_own_slots_only() -> None:
    query, block, context = random_inputs(1, 1, 4)
    zero = torch.zeros(1, dtype=torch.int64)
    out = block_attention(query, block, context, plan_groups(zero, zero, S))
    poisoned = (torch.full_like(context[0], torch.nan), torch.full_like(context[1], torch.nan))
    assert torch.isfinite(out).all()
    assert torch.equal(out, block_attention(query, block, poisoned, plan_groups(zero, zero, S)))


@pytest.mark.parametrize("count", [1, BLOCKS_PER_CALL, BLOCKS_PER_CALL + 1, 5 * BLOCKS_PER_CALL])
def test_cost_is_linear_in_the_slots(count: int) -> None:
    rows, anchors = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    groups = plan_groups(rows, anchors, S)
    assert sorted(torch.cat([g.blocks for g in groups]).tolist()) == list(range(count))
    scores = sum(g.visible.numel() for g in groups)
    assert scores <= count * S * (count + BLOCKS_PER_CALL * S), "slots x (context + a constant), not slots squared"
    assert all(g.context_length == int(anchors[g.blocks].max()) for g in groups)


def test_decoding_attends_like_a_single_block() -> None:
    query, block, context = random_inputs(1, 1, 9)
    joined = [torch.cat([c[0], b[0]]) for c, b in zip(context, block, strict=True)]
    nine = torch.tensor([9])
    expected = reference_attention(query, block, context, torch.tensor([0]), nine)[0]
    assert torch.allclose(cached_attention(query[0], *joined), expected, atol=1e-12)
