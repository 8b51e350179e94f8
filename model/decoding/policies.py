"""Verification policies of a serving engine (DSpark §5.4): how many drafts of each running request to verify.

A planner sees what an engine would see: this round's confidences, and what it remembers of earlier rounds.
Legend: R running requests, K draft positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from model.decoding.cost_table import CostTable
from model.decoding.scheduler import admit_top, best_capacity, schedule

UNKNOWN_CONFIDENCE = 0.5
"""What a planner assumes of a draft before it has seen any confidence at all."""
_WEIGHT, _FULL_BATCH = 0.1, 16
"""Of the newest step in running means; steps of fewer requests than the second say less and weigh less."""
_CLOSE = 0.99
"""Of block lengths whose gains are as close as this the longest is drafted: it costs little, and more is learnt."""
_PROBE_EVERY = 512
"""Steps between two whole blocks drafted whatever the gains say: what is never drafted is never learnt about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How the drafts to verify are chosen."""

    mode: Literal["static", "threshold", "synchronous", "asynchronous"]
    drafts: int | None = None
    """Static: drafts proposed and verified per round; else the whole block is drafted."""


POLICIES: dict[str, Policy] = {
    "none": Policy(mode="static", drafts=0),
    "mtp1": Policy(mode="static", drafts=1),
    "static3": Policy(mode="static", drafts=3),
    "static5": Policy(mode="static", drafts=5),
    "static7": Policy(mode="static", drafts=7),
    "threshold": Policy(mode="threshold"),
    "dspark": Policy(mode="synchronous"),
    "dspark_async": Policy(mode="asynchronous"),
}
"""`mtp1` is a drafter of one position with the same acceptance and the same cost per position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """What the policies of different names share; the defaults live in the job's configuration."""

    threshold: float
    """Of the policy `threshold`: a round stops before the first draft below it."""
    adapt_drafting: bool
    """Let the DSpark policies draft only so many positions as paid in earlier steps, down to none."""
    smooth_costs: bool
    """Let Algorithm 1 plan with the table's cliffs smoothed; the time that passes is always the table's own."""


class Planner:
    """One policy's decisions, step after step. Rows are running requests, in the engine's order."""

    def __init__(self, policy: Policy, block_size: int, table: CostTable, options: PlannerOptions) -> None:
        self._policy, self._table, self._options = policy, table, options
        self._smooth = table.smoothed() if options.smooth_costs else table
        self._block = block_size
        self._steps = 0
        self._new_K = np.full(block_size, UNKNOWN_CONFIDENCE)
        self._last_RK, self._older_RK = np.empty((2, 0, block_size))
        """Confidences of one and of two rounds ago."""
        self._gain_K = self._next_gain_K = np.full(block_size, np.inf)
        """Running means: Θ when drafting k positions, in multiples of plain decoding's; as usable now and a step on."""

    def enter(self, count: int) -> None:
        """`count` requests join behind the running ones; the mean over all requests stands for their past."""
        rows = np.tile(self._new_K, (count, 1))
        self._map_past(lambda past_RK: np.concatenate([past_RK, rows]))

    def leave(self, stays_R: np.ndarray) -> None:
        """Requests leave where the mask is False."""
        if not stays_R.all():
            self._map_past(lambda past_RK: past_RK[stays_R])

    def plan(self, confidences_RK: np.ndarray, limits_R: np.ndarray) -> tuple[np.ndarray, int]:
        """Drafts to verify [R], and the positions that the drafter computed for them (0: it did not run).

        `confidences_RK` are those of this round's whole blocks; what the policy does not draft it does not look at.
        """
        policy, requests = self._policy, len(limits_R)
        if policy.mode == "static":
            drafts = policy.drafts or 0
            return np.minimum(limits_R, drafts), drafts * requests
        if policy.mode == "threshold":
            above_R = np.cumprod(confidences_RK >= self._options.threshold, axis=1).sum(axis=1)
            return np.minimum(limits_R, above_R), self._block * requests
        drafts = self._positions_to_draft() if self._options.adapt_drafting else self._block
        if drafts == 0:
            return np.zeros_like(limits_R), 0
        within_R = np.minimum(limits_R, drafts)
        overhead = self._table.draft_cost(drafts * requests)
        if policy.mode == "synchronous":
            lengths_R = schedule(confidences_RK, self._smooth, within_R, overhead_seconds=overhead).lengths_R
        else:
            planned = best_capacity(self._older_RK, self._table, within_R, overhead_seconds=overhead)
            lengths_R = admit_top(confidences_RK, planned.tokens - requests, self._table, within_R).lengths_R
        self._remember(confidences_RK, limits_R, drafts)
        return lengths_R, drafts * requests

    def _positions_to_draft(self) -> int:
        """The block length that gained most in earlier steps; 0 where none beat plain decoding."""
        self._steps += 1
        if self._steps % _PROBE_EVERY == 1:
            return self._block
        good_K = self._gain_K >= max(_CLOSE * self._gain_K.max(), 1.0)
        return int(np.flatnonzero(good_K)[-1]) + 1 if good_K.any() else 0

    def _remember(self, confidences_RK: np.ndarray, limits_R: np.ndarray, drafts: int) -> None:
        """Keep the round and learn what each block length would have gained; nothing is learnt beyond `drafts`."""
        seen_RK = np.where(np.arange(self._block) < drafts, confidences_RK, self._new_K)
        weight = _WEIGHT * min(1.0, len(limits_R) / _FULL_BATCH)
        self._new_K = self._new_K + weight * (seen_RK.mean(axis=0) - self._new_K)
        self._older_RK, self._last_RK = self._last_RK, seen_RK
        if self._options.adapt_drafting:
            gain_K = self._next_gain_K.copy()
            for count in range(1, drafts + 1):
                gain = self._gain(confidences_RK, np.minimum(limits_R, count), count)
                old = gain_K[count - 1]
                gain_K[count - 1] = gain if np.isinf(old) else old + weight * (gain - old)
            # Asynchronously, the next round is prepared before this one's confidences arrive.
            self._gain_K = self._next_gain_K if self._policy.mode == "asynchronous" else gain_K
            self._next_gain_K = gain_K

    def _gain(self, confidences_RK: np.ndarray, within_R: np.ndarray, count: int) -> float:
        requests = len(within_R)
        overhead = self._table.draft_cost(count * requests)
        best = best_capacity(confidences_RK, self._table, within_R, overhead_seconds=overhead)
        return best.tokens_per_second / (requests * self._table.at(requests))

    def _map_past(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self._last_RK, self._older_RK = change(self._last_RK), change(self._older_RK)
