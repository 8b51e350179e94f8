from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.decoding.sampling import Sampling, draw, residual, verify_greedy, verify_sampled, warp
from model.errors import DecodingError

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5)
LOGITS = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6)


def normalised(weights: list[float]) -> Tensor:
    tensor = torch.tensor(weights)
    return tensor / tensor.sum()


def count(value: int) -> Tensor:
    return torch.tensor([value])


@given(
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.lists(st.integers(0, 3), min_size=7, max_size=7),
    st.integers(0, 6),
)
def test_greedy_accepts_the_common_prefix_of_what_was_proposed(
    drafts: list[int], best: list[int], proposed: int
) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor(best), 4).float()[None]
    accepted, next_token = verify_greedy(torch.tensor([drafts]), count(proposed), logits)
    n = int(accepted)
    assert drafts[:n] == best[:n]
    assert int(next_token) == best[n]
    assert n == proposed or drafts[n] != best[n]


@given(WEIGHTS, WEIGHTS)
def test_accept_or_residual_adds_up_to_the_target(p_weights: list[float], q_weights: list[float]) -> None:
    p, q = normalised(p_weights), normalised(q_weights)
    accepted = torch.minimum(p, q)
    rest = residual(p, q)
    emitted = accepted + (1 - accepted.sum()) * rest / rest.sum()
    assert torch.allclose(emitted, p, atol=1e-5)


def test_identical_distributions_always_accept_and_disjoint_never() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    q = torch.tensor([0.0, 0.0, 0.5, 0.5])
    B = 200
    uniforms = torch.rand(B, 3, generator=torch.Generator().manual_seed(0))
    target, proposed = p.expand(B, 3, 4), torch.full((B,), 2)
    same = verify_sampled(torch.tensor([[0, 1]] * B), proposed, p.expand(B, 2, 4), target, uniforms)
    assert same.accepted.tolist() == [2] * B
    other = verify_sampled(torch.tensor([[2, 3]] * B), proposed, q.expand(B, 2, 4), target, uniforms)
    assert other.accepted.tolist() == [0] * B
    assert set(other.next_token.tolist()) == {0, 1}


def test_drafts_that_were_not_proposed_do_not_count_whatever_their_logits_hold() -> None:
    p = torch.tensor([0.2, 0.8])
    target = torch.stack([p, torch.full((2,), float("nan"))])[None]
    verdict = verify_sampled(torch.tensor([[1]]), count(0), p[None, None], target, torch.tensor([[0.0, 0.1]]))
    # No residual either: without a rejected draft the next token is the target's own sample.
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([0], [0])
    assert verify_greedy(torch.tensor([[1]]), count(0), target).next_token.tolist() == [1]


def test_no_draft_is_a_plain_sample() -> None:
    none = torch.zeros(1, 0, dtype=torch.long)
    target = torch.tensor([[[0.0, 1.0]]])
    verdict = verify_sampled(none, count(0), torch.zeros(1, 0, 2), target, torch.tensor([[0.3]]))
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([0], [1])


def test_rounding_that_leaves_no_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p), p)


@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_sum(weights: list[float], uniform: float) -> None:
    index = int(draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    edges = np.concatenate([[0.0], np.cumsum(np.float32(weights), dtype=np.float64)])
    assert edges[index] <= uniform * edges[-1] * (1 + 1e-12)
    assert uniform * edges[-1] <= edges[index + 1] * (1 + 1e-12)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_draw_never_takes_a_token_without_weight(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.7, 0.0, 0.0]])
    assert int(draw(weights, torch.tensor([uniform], dtype=torch.float64))) in (1, 3)


def test_temperature_is_a_float32_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 1.5], dtype=torch.bfloat16)
    weights = warp(logits, Sampling(temperature=0.5))
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, torch.softmax(logits.float() * 2, dim=-1))
    assert float(warp(logits * 100, Sampling(temperature=1.0)).sum()) == pytest.approx(1.0)


def expected_warp(logits: list[float], sampling: Sampling) -> np.ndarray:
    """The definition, one token at a time."""
    values = np.exp(np.array(logits) / sampling.temperature)
    p = values / values.sum()
    order = sorted(range(len(p)), key=lambda i: (-np.float32(p[i]), i))
    kept = order[: sampling.top_k] if sampling.top_k > 0 else order
    mass = p[kept].sum()
    chosen, so_far = [], 0.0
    for token in kept:
        if so_far < sampling.top_p:
            chosen.append(token)
        so_far += p[token] / mass
    least = np.float32(p[chosen[-1]])
    chosen = [token for token in order if np.float32(p[token]) >= least * (1 - 1e-6)]
    out = np.zeros(len(p))
    out[chosen] = p[chosen] / p[chosen].sum()
    return out


@given(LOGITS, st.sampled_from([0.5, 1.0]), st.sampled_from([0.11, 0.53, 0.97, 1.0]), st.sampled_from([-1, 1, 3, 9]))
def test_top_k_then_top_p(logits: list[float], temperature: float, top_p: float, top_k: int) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    distinct = [value + 0.01 * index for index, value in enumerate(logits)]
    found = warp(torch.tensor(distinct, dtype=torch.float32), sampling)
    assert np.allclose(found.numpy(), expected_warp(distinct, sampling), atol=2e-3)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)


def test_equal_tokens_at_the_border_are_all_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, -9.0])
    assert (warp(logits, Sampling(temperature=1.0, top_k=2)) > 0).tolist() == [True, True, True, False]
    assert (warp(logits, Sampling(temperature=1.0, top_p=0.85)) > 0).tolist() == [True, True, True, False]


def test_a_flat_distribution_needs_more_than_the_candidates() -> None:
    logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [6.0]])
    kept = warp(logits, Sampling(temperature=1.0, top_p=0.9))
    for row, values in zip(logits.double().softmax(-1), kept, strict=True):
        count = int((values > 0).sum())
        largest = row.sort(descending=True).values.cumsum(0)
        assert float(largest[count - 1]) >= 0.9 - 1e-6
        assert float(largest[count - 2]) < 0.9 + 1e-6
    assert int((kept[0] > 0).sum()) > 3000
    assert int((kept[1] > 0).sum()) < 512


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}])
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(DecodingError, match="out of range"):
        Sampling(**{"temperature": 1.0, **bad})
