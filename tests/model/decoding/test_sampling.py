from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.decoding.sampling import Verdict, choose, probabilities, residual, verify_greedy, verify_sampled

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5)


def normalised(weights: list[float]) -> Tensor:
    tensor = torch.tensor(weights)
    return tensor / tensor.sum()


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_greedy_accepts_the_common_prefix(drafts: list[int], best: list[int]) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor(best), 4).float()[: len(drafts) + 1]
    accepted, next_token = verify_greedy(drafts, logits)
    assert drafts[:accepted] == best[:accepted]
    assert next_token == best[accepted]
    assert accepted == len(drafts) or drafts[accepted] != best[accepted]


@given(WEIGHTS, WEIGHTS)
def test_accept_or_residual_adds_up_to_the_target(p_weights: list[float], q_weights: list[float]) -> None:
    p, q = normalised(p_weights), normalised(q_weights)
    accepted = torch.minimum(p, q)
    rest = residual(p, q)
    emitted = accepted + (1 - accepted.sum()) * rest / rest.sum()
    assert torch.allclose(emitted, p, atol=1e-5)


def test_identical_distributions_always_accept_and_disjoint_never() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    q = torch.tensor([0.0, 0.0, 0.5, 0.5])
    target = p.repeat(3, 1)
    for token in (0, 1):
        assert verify_sampled([token, token], [p, p], target, generator).accepted == 2
    verdicts = [verify_sampled([2, 3], [q, q], target, generator) for _ in range(200)]
    assert {verdict.accepted for verdict in verdicts} == {0}
    assert {verdict.next_token for verdict in verdicts} == {0, 1}


def test_no_draft_is_a_plain_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    assert verify_sampled([], [], torch.tensor([[0.0, 1.0]]), generator) == Verdict(0, 1)


def test_rounding_that_leaves_no_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)


def test_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 1.5], dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    assert choose(logits, 0.0, generator) == (2, None)
    token, weights = choose(logits, 0.5, generator)
    assert weights is not None
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, torch.softmax(logits.float() * 2, dim=-1))
    assert 0 <= token < 3
    assert float(probabilities(logits * 100, 1.0).sum()) == pytest.approx(1.0)
