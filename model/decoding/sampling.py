"""Sampling and rejection sampling of speculative decoding (DSpark §2): pure functions on logits and probabilities.

A drafted token x is accepted with probability min(1, p(x)/q(x)); the first rejected one is replaced by a sample from
norm(max(p - q, 0)); if all are accepted a bonus token comes from p. So the output has exactly the distribution p, for
any q: p is the target's softmax after temperature, top-k and top-p, and temperature 0 its greedy token. Randomness
comes in as uniforms, so that a row's draws never depend on the rows beside it. Every softmax is float32, every
cumulative sum float64. Legend: B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from model.errors import DecodingError

_CANDIDATES = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What turns logits into the distribution to sample from; temperature 0 is greedy and ignores the rest."""

    temperature: float
    top_p: float = 1.0
    """Keep the most probable tokens until their probabilities reach this."""
    top_k: int = -1
    """Keep this many of the most probable tokens; -1 keeps all. Applied before top_p."""

    def __post_init__(self) -> None:
        """Raises DecodingError for impossible settings."""
        if self.temperature < 0 or not 0 < self.top_p <= 1 or (self.top_k < 1 and self.top_k != -1):
            raise DecodingError(
                f"temperature {self.temperature} (at least 0), top_p {self.top_p} (above 0, at most 1), top_k "
                f"{self.top_k} (at least 1, or -1 for all): out of range"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0


class Verdict(NamedTuple):
    """int64 [B] each: how many drafts were accepted, and the token that follows them (correction or bonus)."""

    accepted: Tensor
    next_token: Tensor


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities float32 [..., V] of logits [..., V] after temperature, top-k and top-p, in this order.

    Tokens as probable as the last one kept are kept as well, so that the result does not depend on any order.
    """
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        probabilities = _keep(probabilities, probabilities.topk(sampling.top_k, dim=-1).values[..., -1:])
    if sampling.top_p < 1:
        probabilities = _keep(probabilities, _nucleus_edge(probabilities, sampling.top_p))
    return probabilities


def _keep(probabilities: Tensor, least: Tensor) -> Tensor:
    kept = probabilities.masked_fill(probabilities < least, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _nucleus_edge(probabilities: Tensor, top_p: float) -> Tensor:
    """[..., 1]: the smallest of the largest probabilities that together reach top_p.

    Sorting a whole vocabulary costs as much as a small model's forward, and the few most probable nearly always do.
    """
    values = probabilities.topk(min(_CANDIDATES, probabilities.shape[-1]), dim=-1).values
    if bool((values.double().sum(dim=-1) < top_p).any()):
        values = probabilities.sort(dim=-1, descending=True).values
    before = values.double().cumsum(dim=-1) - values
    return values.masked_fill(before >= top_p, torch.inf).amin(dim=-1, keepdim=True)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Indices int64 [...] with probability proportional to non-negative weights [..., V], from uniforms [...] in [0,1).

    By inversion of the cumulative sum; an index of weight 0 is never drawn.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[..., -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms.double()[..., None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the last index that has any weight: rounding must not pass it
    return torch.minimum(index, last).squeeze(-1)


def verify_greedy(draft_ids_BK: Tensor, proposed_B: Tensor, target_logits: Tensor) -> Verdict:
    """Accept drafts while they are the target's argmax; target_logits [B, K + 1, V].

    Only the first proposed_B[b] drafts of a row count; logits behind them may hold anything.
    """
    best = target_logits.argmax(dim=-1)
    accepted = _run_length(draft_ids_BK == best[:, :-1], proposed_B)
    return Verdict(accepted, best.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(
    draft_ids_BK: Tensor, proposed_B: Tensor, draft_BKV: Tensor, target: Tensor, uniforms: Tensor
) -> Verdict:
    """Rejection sampling of drafts that were drawn from draft_BKV, against target probabilities [B, K + 1, V].

    uniforms [B, K + 1]: one per draft, and the last for the token that follows. Rows as in verify_greedy.
    """
    K = draft_ids_BK.shape[1]
    ids = draft_ids_BK[..., None]
    p = target[:, :K].gather(2, ids).squeeze(2)
    q = draft_BKV.gather(2, ids).squeeze(2)
    # u < p/q without the division; q(token) > 0, for the token was drawn from q.
    accepted = _run_length(uniforms[:, :K] * q < p, proposed_B)
    rows = torch.arange(len(accepted), device=accepted.device)
    p_V = target[rows, accepted]
    if K:
        q_V = draft_BKV[rows, accepted.clamp_max(K - 1)]
        p_V = torch.where((accepted < proposed_B)[:, None], residual(p_V, q_V), p_V)
    return Verdict(accepted, draw(p_V, uniforms[:, K]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) [..., V], unnormalised; p itself where rounding left nothing (then p and q are equal)."""
    rest = (p - q).clamp_min(0.0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)


def _run_length(accepts_BK: Tensor, proposed_B: Tensor) -> Tensor:
    """How many leading proposed drafts are accepted, int64 [B]."""
    positions = torch.arange(accepts_BK.shape[1], device=accepts_BK.device)
    return (accepts_BK & (positions < proposed_B[:, None])).long().cumprod(dim=1).sum(dim=1)
