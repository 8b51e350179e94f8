"""Rejection sampling of speculative decoding (DSpark §2): pure functions on logits and probabilities.

A drafted token x is accepted with probability min(1, p(x)/q(x)); the first rejected one is replaced by a sample from
norm(max(p - q, 0)); if all are accepted a bonus token comes from p. So the output has exactly the target's
distribution, and temperature 0 its greedy tokens. Every softmax is float32. Legend: K drafts, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """A token and the distribution [V] it was drawn from (None when greedy)."""

    token: int
    probabilities: Tensor | None


class Verdict(NamedTuple):
    """How many drafted tokens were accepted, and the token that follows them (correction or bonus)."""

    accepted: int
    next_token: int


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float32 over the last axis."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(weights_V: Tensor, generator: torch.Generator) -> int:
    """One index with probability proportional to non-negative weights."""
    return int(torch.multinomial(weights_V, 1, generator=generator))


def choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Choice:
    """A token from logits [V]: the argmax at temperature 0, else a sample."""
    if temperature == 0:
        return Choice(int(logits_V.argmax()), None)
    weights = probabilities(logits_V, temperature)
    return Choice(draw(weights, generator), weights)


def verify_greedy(draft_ids: list[int], target_logits: Tensor) -> Verdict:
    """Accept drafts while they are the target's argmax; target_logits [len(draft_ids) + 1, V]."""
    best = target_logits.argmax(dim=-1).tolist()
    accepted = 0
    while accepted < len(draft_ids) and draft_ids[accepted] == best[accepted]:
        accepted += 1
    return Verdict(accepted, best[accepted])


def verify_sampled(
    draft_ids: list[int], draft_probabilities: list[Tensor], target_probabilities: Tensor, generator: torch.Generator
) -> Verdict:
    """Rejection sampling of drafts that were drawn from draft_probabilities (each [V]).

    target_probabilities is [len(draft_ids) + 1, V], float32.
    """
    for k, (token, q) in enumerate(zip(draft_ids, draft_probabilities, strict=True)):
        p = target_probabilities[k]
        uniform = torch.rand((), generator=generator, device=p.device)
        # u < p/q without the division; q(token) > 0, for the token was drawn from q.
        if not bool(uniform * q[token] < p[token]):
            return Verdict(k, draw(residual(p, q), generator))
    return Verdict(len(draft_ids), draw(target_probabilities[len(draft_ids)], generator))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), unnormalised; p itself where rounding left nothing (then p and q are equal)."""
    rest = (p - q).clamp_min(0.0)
    return rest if bool(rest.sum() > 0) else p
