"""The chunked [rows, V] work: equal to the formula for any chunk size, in bf16 too, and small in memory."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.chunked_loss import DraftRows, SlotTargets, chunked_rows
from model.losses import dspark_loss, reference_loss
from model.row_loss import RowTerms
from model.target_heads import TargetHeads
from tests.golden_data import grads_of, load_case

V, D, M = 300, 6, 4


def problem(row_of_slot: list[int], dtype: torch.dtype) -> tuple[DraftRows, SlotTargets, TargetHeads]:
    generator = torch.Generator().manual_seed(len(row_of_slot))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    slots = len(row_of_slot)
    rows = torch.unique(torch.tensor(row_of_slot), return_inverse=True)[1]
    draft = DraftRows(
        draw(slots, D).requires_grad_(True), draw(slots, M).requires_grad_(True), draw(V, M).requires_grad_(True)
    )
    target = SlotTargets(
        last_hidden_UD=draw(int(rows.max()) + 1, D),
        row_of_slot=rows,
        labels=torch.randint(0, V, (slots,), generator=generator),
        weights=torch.rand(slots, generator=generator),
    )
    return draft, target, TargetHeads.from_tensors(draw(V, D), draw(V, D))


def formula(
    draft: DraftRows, target: SlotTargets, heads: TargetHeads, terms: RowTerms
) -> tuple[Tensor, Tensor, Tensor]:
    assert draft.features is not None
    assert draft.w2_WM is not None
    logits = heads.logits(draft.hidden_RD) + draft.features @ draft.w2_WM.T
    p = heads.logits(target.last_hidden_UD).softmax(-1)[target.row_of_slot]
    ce = torch.nn.functional.cross_entropy(logits, target.labels, reduction="none")
    l1 = (logits.softmax(-1) - p).abs().sum(-1)
    return ce, l1, (target.weights * (terms.ce * ce + terms.l1 * l1)).sum()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=70), st.integers(1, 80), st.sampled_from([(0.1, 0.9), (1.0, 0.0)])
)
def test_any_sharing_and_any_chunk_size_equal_the_formula(
    row_of_slot: list[int], rows_per_chunk: int, weights: tuple[float, float]
) -> None:
    draft, target, heads = problem(row_of_slot, torch.float64)
    terms = RowTerms(*weights, rows_per_chunk=rows_per_chunk)
    ours, exact = chunked_rows(draft, target, heads, terms), formula(draft, target, heads, terms)
    leaves = (draft.hidden_RD, draft.features, draft.w2_WM)
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)
    scale = 3.5  # whatever the caller multiplies the sum with
    for a, b in zip(
        torch.autograd.grad(ours[2] * scale, leaves), torch.autograd.grad(exact[2] * scale, leaves), strict=True
    ):
        assert torch.allclose(a.double(), b.double(), atol=2e-5)


def test_no_markov_head() -> None:
    draft, target, heads = problem(list(range(20)), torch.float32)
    plain = DraftRows(draft.hidden_RD, None, None)
    zero = DraftRows(draft.hidden_RD, torch.zeros_like(draft.features), draft.w2_WM)
    terms = RowTerms(0.1, 0.9, rows_per_chunk=7)
    expected = torch.autograd.grad(chunked_rows(zero, target, heads, terms)[2], draft.hidden_RD)[0]
    assert torch.allclose(
        torch.autograd.grad(chunked_rows(plain, target, heads, terms)[2], draft.hidden_RD)[0], expected
    )


def test_without_gradients_the_values_are_the_same() -> None:
    draft, target, heads = problem(list(range(20)), torch.float32)
    terms = RowTerms(0.1, 0.9, rows_per_chunk=7)
    with torch.no_grad():
        values = chunked_rows(draft, target, heads, terms)
    assert not values[2].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(values, chunked_rows(draft, target, heads, terms), strict=True))


class LargestRows(TorchFunctionMode):
    """Records the most rows of [rows, V] that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == V:
                self.rows = max(self.rows, len(tensor))
        return result


class CountingHeads(TargetHeads):
    """Counts the rows that were given the target's logits."""

    rows = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows += len(hidden)
        return super().logits(hidden)


@pytest.mark.parametrize("rows_per_chunk", [7, 16, 50])
def test_one_chunk_at_a_time_and_every_target_row_once(rows_per_chunk: int) -> None:
    draft, target, heads = problem([slot // 3 for slot in range(150)], torch.float32)
    counting = CountingHeads(heads.embedding_VD, heads.untied_head_VD)
    with LargestRows() as seen:
        chunked_rows(draft, target, counting, RowTerms(0.1, 0.9, rows_per_chunk=rows_per_chunk))
    assert 0 < seen.rows <= rows_per_chunk
    assert counting.rows == 50


def test_a_second_backward_is_refused() -> None:
    draft, target, heads = problem([0, 0, 1], torch.float32)
    total = chunked_rows(draft, target, heads, RowTerms(0.1, 0.9, rows_per_chunk=7))[2]
    torch.autograd.grad(total, draft.hidden_RD, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(total, draft.hidden_RD)


@pytest.mark.parametrize("name", [f"b7_{head}_conf-plain" for head in ("none", "vanilla", "gated", "rnn")])
def test_bfloat16_is_as_near_to_float32_as_plain_autograd_in_bfloat16(name: str) -> None:
    """Averaged over drafters: rounding flips the sign of q - p now and then, which moves one gradient a lot."""
    case = load_case(name)
    config = dataclasses.replace(case.loss_config, rows_per_chunk=40)
    half_heads = copy.deepcopy(case.heads).bfloat16()
    errors = []
    for seed in range(6):
        drafter, generator = copy.deepcopy(case.drafter), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * float(parameter.abs().mean()) * noise)
        exact = reference_loss(drafter, case.heads, case.inputs, config)
        wanted = grads_of(drafter, exact.total / exact.weight)
        drafter.bfloat16()
        for loss in (dspark_loss, reference_loss):
            out = loss(drafter, half_heads, case.inputs, config)
            assert out.total.dtype == torch.float32
            assert float(out.total.detach()) == pytest.approx(float(exact.total.detach()), rel=1e-2)
            gradients = grads_of(drafter, out.total / out.weight)
            assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
            errors.append([float((gradients[key].float() - wanted[key]).norm() / wanted[key].norm()) for key in wanted])
    ours, plain = torch.tensor(errors).view(6, 2, -1).mean(dim=0)
    assert (ours < 1.3 * plain + 3e-3).all(), torch.stack([ours, plain], dim=1)


def test_mixed_precision_heads() -> None:
    case = load_case("b7_vanilla_conf-markov")
    exact = dspark_loss(case.drafter, case.heads, case.inputs, case.loss_config)
    mixed = dspark_loss(case.drafter, case.heads.bfloat16(), case.inputs, case.loss_config)
    assert float(mixed.total.detach()) == pytest.approx(float(exact.total.detach()), rel=2e-2)
    assert all(g.dtype == torch.float32 for g in grads_of(case.drafter, mixed.total).values())
