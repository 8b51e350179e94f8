"""The row-wise part of the loss in plain torch: equal to autograd over the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.row_loss import ChunkLogits, ChunkSlots, RowTerms, row_losses
from tests.model.row_cases import TERMS, RowCase


def formula(logits: ChunkLogits, slots: ChunkSlots, terms: RowTerms) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """CE, L1, and the gradients with respect to logits and bias, all float64, the probabilities over V columns."""
    draft = logits.draft_nW.double().clone().requires_grad_(True)
    bias = None if logits.bias_uW is None else logits.bias_uW.double().clone().requires_grad_(True)
    z = draft if bias is None else draft + bias[slots.row_of_slot]
    p = logits.target_uV.double().softmax(-1)[slots.row_of_slot]
    q = z.softmax(-1)
    if logits.columns_W is not None:
        q = torch.zeros_like(p).index_copy(1, logits.columns_W, q)
    has_label = slots.labels >= 0
    ce = torch.nn.functional.cross_entropy(z, slots.labels.clamp_min(0), reduction="none") * has_label
    l1 = (q - p).abs().sum(-1)
    (slots.weights * (terms.ce * ce + terms.l1 * l1)).sum().backward()
    assert draft.grad is not None
    return ce.detach(), l1.detach(), draft.grad, None if bias is None else bias.grad


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([150, 101, 1]),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.sampled_from([(0.1, 0.9), (1.0, 0.0), (0.0, 1.0)]),
)
def test_equals_autograd_over_the_formula(
    dtype: torch.dtype, bias: bool, columns: int, counts: list[int], weights: tuple[float, float]
) -> None:
    case = RowCase(dtype=dtype, bias=bias, columns=columns, counts=tuple(counts))
    terms = RowTerms(*weights, rows_per_chunk=512)
    logits, slots = case.draw()
    ce, l1, gradient, bias_gradient = formula(logits, slots, terms)
    values = row_losses(logits, slots, terms, gradient=True)
    exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    rounded = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
    assert torch.allclose(values[0].double(), ce, rtol=exact, atol=exact)
    assert torch.allclose(values[1].double(), l1, rtol=exact, atol=exact)
    assert torch.allclose(logits.draft_nW.double(), gradient, rtol=rounded, atol=rounded / 10)
    if bias_gradient is not None:
        assert logits.bias_uW is not None
        assert torch.allclose(logits.bias_uW.double(), bias_gradient, rtol=rounded, atol=rounded)


def test_extreme_logits_stay_exact() -> None:
    """A label whose q underflows, and rows where q equals p to the last bit."""
    logits, slots = RowCase(dtype=torch.float32, bias=False, counts=(1, 1)).draw()
    logits.draft_nW[0] = 0.0
    logits.draft_nW[0, 0], logits.draft_nW[0, int(slots.labels[0])] = 300.0, -300.0
    logits.draft_nW[1] = logits.target_uV[1]
    ce, l1, gradient, _ = formula(logits, slots, TERMS)
    values = row_losses(logits, slots, TERMS, gradient=True)
    assert float(values[0][0]) == pytest.approx(float(ce[0])) == 600.0
    assert float(values[1][1]) == 0.0 == float(l1[1])
    assert torch.isfinite(logits.draft_nW).all()
    assert torch.allclose(logits.draft_nW[0].double(), gradient[0], atol=1e-6)


def test_a_vocabulary_of_150_thousand_keeps_float32_accuracy() -> None:
    logits, slots = RowCase(dtype=torch.float32, bias=True, vocab=151936, columns=151936, counts=(1, 2)).draw()
    ce, l1, gradient, bias_gradient = formula(logits, slots, TERMS)
    values = row_losses(logits, slots, TERMS, gradient=True)
    assert torch.allclose(values[0].double(), ce, rtol=1e-6)
    assert torch.allclose(values[1].double(), l1, rtol=1e-6)
    assert float((logits.draft_nW - gradient).abs().max()) < 2e-6 * float(gradient.abs().max())
    assert logits.bias_uW is not None
    assert bias_gradient is not None
    assert float((logits.bias_uW - bias_gradient).abs().max()) < 2e-6 * float(bias_gradient.abs().max())


@pytest.mark.parametrize("bias", [True, False])
def test_threads_share_a_chunk_and_leave_the_thread_count_alone(bias: bool) -> None:
    case = RowCase(dtype=torch.float32, bias=bias, columns=101, counts=(3, 1, 9, 2, 7))
    (single, slots), (shared, _) = case.draw(), case.draw()
    expected = row_losses(single, slots, TERMS, gradient=True)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        values = row_losses(shared, slots, TERMS, gradient=True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    pairs = [*zip(values, expected, strict=True), (shared.draft_nW, single.draft_nW)]
    if single.bias_uW is not None and shared.bias_uW is not None:
        pairs.append((shared.bias_uW, single.bias_uW))
    assert all(torch.equal(a, b) for a, b in pairs)
