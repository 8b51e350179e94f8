"""Continuous batching in simulation (DSpark §5.4, Figures 7 and 8): what a verification policy gains under load.

A simulated engine drafts, lets the policy choose how many drafts of each request to verify, takes the step's time from
the cost table and commits what the trace says would be accepted. Not simulated: prefill, key/value memory, the
scheduler's own microseconds, the drafter's catching up after a pause. A request whose rounds were cut shorter than
they were recorded still reads them in order, from the start again when they run out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from model.decoding.cost_table import CostTable
from model.decoding.policies import POLICIES, Planner, PlannerOptions
from model.decoding.trace import Trace
from model.errors import DecodingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Who asks for how much, and what the policies may do about it."""

    concurrency: int
    """Requests that run at the same time at most; without an arrival rate, so many users who ask again at once."""
    requests: int
    """Finished requests that are measured, after the first `concurrency` of them."""
    arrivals_per_second: float | None
    """Poisson arrivals into a first-come queue; None: closed loop."""
    options: PlannerOptions
    seed: int

    def __post_init__(self) -> None:
        """Raises DecodingError for values out of range."""
        rate = self.arrivals_per_second
        if self.concurrency < 1 or self.requests < 1 or (rate is not None and not 0 < rate < math.inf):
            raise DecodingError(
                f"concurrency {self.concurrency} and {self.requests} requests (at least 1), {rate} arrivals per second "
                "(above 0, or none for a closed loop): out of range"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One policy under one load: averages over the measured time."""

    policy: str
    concurrency: int
    tokens_per_second: float
    """Committed by the engine."""
    tokens_per_second_per_user: float
    """Committed tokens ÷ seconds that requests spent running; waiting in the queue does not count."""
    accepted_length: float
    """τ: tokens per request and round, bonus included."""
    budget: float
    """Drafts verified per request and round."""
    step_tokens: float
    """B: tokens per step."""
    drafted_steps: float
    """Share of the steps that ran the drafter."""
    queue_seconds: float
    """Mean wait before a request started."""
    seconds: float
    """Simulated time measured."""


def simulate(trace: Trace, table: CostTable, policy: str, load: Load) -> Point:
    """Run one policy under one load; the same arguments give the same point.

    Raises DecodingError for a policy that is unknown or verifies more drafts than a block has, and for a table that
    ends before the largest step that the load allows.
    """
    chosen = POLICIES.get(policy)
    if chosen is None:
        raise DecodingError(f"policy {policy!r} is unknown; wanted one of {', '.join(POLICIES)}")
    if (chosen.drafts or 0) > trace.block_size:
        raise DecodingError(f"policy {policy} verifies {chosen.drafts} drafts, the trace has {trace.block_size}")
    largest = load.concurrency * (1 + (trace.block_size if chosen.drafts is None else chosen.drafts))
    if largest > table.max_tokens:
        raise DecodingError(
            f"{load.concurrency} requests make steps of up to {largest} tokens, the cost table of {table.target} on "
            f"{table.device} ends at {table.max_tokens}; measure a larger one, or simulate fewer users"
        )
    engine = _Engine(trace, table, Planner(chosen, trace.block_size, table, load.options), load)
    engine.run(load.concurrency)
    engine.totals = _Totals()
    engine.run(load.requests)
    return _point(policy, load, engine.totals)


@dataclass(slots=True)
class _Totals:
    """What is summed over steps."""

    steps: int = 0
    drafted: int = 0
    tokens: int = 0
    rounds: int = 0
    verified: int = 0
    finished: int = 0
    seconds: float = 0.0
    request_seconds: float = 0.0
    started: int = 0
    waited: float = 0.0


class _Engine:
    """The running requests and the clock."""

    def __init__(self, trace: Trace, table: CostTable, planner: Planner, load: Load) -> None:
        self._trace, self._table, self._planner = trace, table, planner
        self._rounds_Q = trace.rounds_Q
        self._concurrency = load.concurrency
        self._rng = np.random.default_rng(load.seed)
        self._order = self._rng.permutation(len(self._rounds_Q))
        self._entered = 0
        self._gap = None if load.arrivals_per_second is None else 1.0 / load.arrivals_per_second
        self._next_arrival = 0.0
        self._now = 0.0
        self.totals = _Totals()
        self._running = np.empty((0, 3), dtype=np.int64)
        """Request of the trace, rounds done, tokens left."""
        self._admit()
        if self._gap is None:  # users do not all begin at the same moment
            share = self._rng.uniform(0, 1, len(self._running))
            self._running[:, 2] = np.ceil(self._running[:, 2] * (1 - share))

    def run(self, requests: int) -> None:
        """Step until so many requests have finished."""
        while self.totals.finished < requests:
            self._step()

    def _step(self) -> None:
        """One draft + verify of everything that runs; finished requests leave, waiting ones enter."""
        request, done, left = self._running.T
        index = self._trace.first_round_Q[request] + done % self._rounds_Q[request]
        limits = np.minimum(left - 1, self._trace.block_size)
        lengths, drafted = self._planner.plan(self._trace.confidences_NK[index], limits)
        emitted = np.minimum(self._trace.accepted_N[index], lengths) + 1
        verified = int(lengths.sum())
        seconds = float(self._table.seconds_B[len(request) + verified - 1]) + self._table.draft_cost(drafted)
        self._running[:, 1] += 1
        self._running[:, 2] -= emitted
        stays = self._running[:, 2] > 0
        totals = self.totals
        totals.steps += 1
        totals.drafted += drafted > 0
        totals.tokens += int(emitted.sum())
        totals.rounds += len(request)
        totals.verified += verified
        totals.finished += int((~stays).sum())
        totals.seconds += seconds
        totals.request_seconds += seconds * len(request)
        self._now += seconds
        self._running = self._running[stays]
        self._planner.leave(stays)
        self._admit()

    def _admit(self) -> None:
        """Fill free places from the queue; an idle engine waits for the next arrival."""
        if self._gap is not None and not len(self._running) and self._next_arrival > self._now:
            self.totals.seconds += self._next_arrival - self._now
            self._now = self._next_arrival
        entering: list[tuple[int, int, int]] = []
        while len(self._running) + len(entering) < self._concurrency:
            if self._gap is not None:
                if self._next_arrival > self._now:
                    break
                self.totals.waited += self._now - self._next_arrival
                self._next_arrival += self._rng.exponential(self._gap)
            request = int(self._order[self._entered % len(self._order)])
            entering.append((request, 0, int(self._trace.output_tokens_Q[request])))
            self._entered += 1
        if entering:
            self.totals.started += len(entering)
            self._running = np.concatenate([self._running, np.array(entering, dtype=np.int64)])
            self._planner.enter(len(entering))


def _point(policy: str, load: Load, totals: _Totals) -> Point:
    return Point(
        policy=policy,
        concurrency=load.concurrency,
        tokens_per_second=totals.tokens / totals.seconds,
        tokens_per_second_per_user=totals.tokens / totals.request_seconds,
        accepted_length=totals.tokens / totals.rounds,
        budget=totals.verified / totals.rounds,
        step_tokens=(totals.verified + totals.rounds) / totals.steps,
        drafted_steps=totals.drafted / totals.steps,
        queue_seconds=totals.waited / totals.started if totals.started else 0.0,
        seconds=totals.seconds,
    )
