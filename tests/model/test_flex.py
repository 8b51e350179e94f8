"""Eager FlexAttention has no backward on a CPU: gradients are compared on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from model.attention import BlockLayout, block_attention, plan_groups, reference_attention
from model.flex import TILE, FlexPlan, plan_attention
from tests.model.test_attention import COLUMNS, layout_of, random_inputs

EAGER = "ignore:flex_attention called without torch.compile"


PLACES = [(2, 0, 4), (0, 5, 9), (0, 5, 5), (1, 0, 0), (0, 5, 8), (2, 11, 19), (1, 0, 3)]


@pytest.mark.filterwarnings(EAGER)
@pytest.mark.parametrize(
    "layout",
    [layout_of(PLACES), layout_of(PLACES, window=3), layout_of([(1, 0, 7), (0, 3, 9)], num_queries=1, num_slots=2)],
    ids=["documents", "window", "eagle3"],
)
def test_flex_attention_equals_the_formula(layout: BlockLayout) -> None:
    query, block, context = random_inputs(layout)
    out = FlexPlan(layout, (3, COLUMNS), compiled=False)(query, block, context)
    assert torch.allclose(out, reference_attention(query, block, context, layout), atol=1e-12)


def big_layout(window: int | None) -> tuple[BlockLayout, tuple[int, int]]:
    """Several tiles each way: two rows of 700 columns, documents that begin in the middle of tiles, random anchors."""
    generator = torch.Generator().manual_seed(3)
    places = []
    for row in range(2):
        for start, end in ((0, 150), (150, 700)):
            anchors = torch.randperm(end - start, generator=generator)[:50] + start
            places += [(row, start, int(anchor)) for anchor in anchors]
    return layout_of(places, num_queries=7, num_slots=7, window=window), (2, 700)


@pytest.mark.parametrize("window", [None, 96])
def test_tiles_are_exactly_those_that_hold_something_visible(window: int | None) -> None:
    """Eager FlexAttention evaluates the mask densely, so a wrong table of tiles would show on a GPU only."""
    layout, shape = big_layout(window)
    mask = FlexPlan(layout, shape, compiled=False).mask
    queries, keys = mask.seq_lengths
    visible = mask.mask_mod(None, None, torch.arange(queries)[:, None], torch.arange(keys))
    tiles = visible.view(queries // TILE, TILE, keys // TILE, TILE)
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    assert torch.equal(_listed(mask.full_kv_num_blocks, mask.full_kv_indices), every)
    assert torch.equal(_listed(mask.kv_num_blocks, mask.kv_indices), some & ~every)
    assert float(some.float().mean()) < 0.5
    assert bool(every.any()) == (window is None)


def _listed(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    assert counts is not None
    assert indices is not None
    table = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        table[row, indices[0, 0, row, :count].long()] = True
    return table


def test_the_processor_gets_groups() -> None:
    layout, shape = big_layout(None)
    query, block, context = random_inputs(layout, batch=2, length=700)
    out = plan_attention(layout, shape)(query, block, context)
    assert torch.equal(out, block_attention(query, block, context, plan_groups(layout)))
    empty = layout_of([])
    assert plan_attention(empty, (1, COLUMNS))(*random_inputs(empty)).shape == (0, 3, 4, 8)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_kernel_walks_the_tiles_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's kernel for CPUs reads the tile table as a GPU's does; torch 2.13's wants static shapes."""
    monkeypatch.setattr("model.flex._compiled_attention", lambda: torch.compile(flex_attention, dynamic=False))
    for window in (None, 96):
        layout, shape = big_layout(window)
        query, block, context = random_inputs(layout, batch=2, length=700)
        wide = [torch.nn.functional.pad(x, (0, 8)).float() for x in (query * 2**0.5, *block, *context)]
        out = FlexPlan(layout, shape, compiled=True)(wide[0], (wide[1], wide[2]), (wide[3], wide[4]))[..., :8]
        assert torch.allclose(out.double(), reference_attention(query, block, context, layout), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 96])
def test_compiled_flex_attention_equals_the_reference_on_a_gpu(window: int | None) -> None:
    layout, shape = big_layout(window)
    query, block, context = random_inputs(layout, batch=2, length=700)
    leaves = [query, *block, *context]
    for leaf in leaves:
        leaf.requires_grad_(True)
    expected = reference_attention(query, block, context, layout)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((expected * weight).sum(), leaves)

    def on_gpu(x: Tensor) -> Tensor:
        # FlexAttention's kernels want head sizes from 16 on: zeros change no score but for the scale.
        return torch.nn.functional.pad(x.detach(), (0, 8)).to("cuda", torch.float32).requires_grad_(True)

    fields = ("rows", "starts", "anchors")
    moved = dataclasses.replace(layout, **{name: getattr(layout, name).cuda() for name in fields})
    copies = [on_gpu(leaf) for leaf in leaves]
    attend = plan_attention(moved, shape)
    out = attend(copies[0] * 2**0.5, (copies[1], copies[2]), (copies[3], copies[4]))[..., :8]
    assert torch.allclose(out.cpu().double(), expected, atol=2e-3)
    for found, wanted in zip(torch.autograd.grad((out * weight.cuda()).sum(), copies), gradients, strict=True):
        assert torch.allclose(found[..., :8].cpu().double(), wanted, atol=5e-3)
