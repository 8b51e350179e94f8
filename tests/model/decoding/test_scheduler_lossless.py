"""Scheduled verification at temperature 1 against the target's exact distribution, by χ² on small vocabularies.

A first-order Markov chain is the target, another one the drafter. The confidence of a draft is its true acceptance
probability given the token before it, so it tells which token that was: a scheduler that lets later confidences decide
about earlier drafts selects by content, and the output is no longer the target's (DSpark, Appendix A).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from model.decoding.cost_table import CostTable
from model.decoding.drafting import BlockDrafter
from model.decoding.sampling import draw, verify_sampled
from model.decoding.scheduler import admit_top, best_capacity, cost_schedule, schedule
from model.decoding.speculative import BatchDecoder, DecodeConfig, Request, decode_all
from tests.model.decoding.test_speculative import GOLDEN_DECODE, RUNS, load_run
from tests.tiny_target import tiny_verifier

Decide = Callable[[np.ndarray, int, int], np.ndarray]
"""Confidences [R,K] of a batch, the numbers of its round and of the batch, to lengths [R]."""


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic, and what it exceeds once in 30,000 (Wilson and Hilferty's approximation at 4 sigma)."""
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, freedom * (1 - 2 / (9 * freedom) + 4.0 * (2 / (9 * freedom)) ** 0.5) ** 3


class Chains:
    """Target and drafter over V tokens; confidences are the true acceptance probabilities."""

    def __init__(self, target_VV: list[list[float]], drafter_VV: list[list[float]], block: int) -> None:
        self.p, self.q = torch.tensor(target_VV), torch.tensor(drafter_VV)
        self.block = block
        self.overlap = torch.minimum(self.p, self.q).sum(dim=1)

    def decode(self, decide: Decide, *, rows: int, rounds: int, batch: int) -> np.ndarray:
        """Decode `rows` requests from token 0, `batch` of them scheduled together; the first `rounds` tokens each."""
        generator = torch.Generator().manual_seed(7)
        last = torch.zeros(rows, dtype=torch.long)
        length = torch.zeros(rows, dtype=torch.long)
        output = torch.full((rows, rounds * (self.block + 1)), -1)
        for number in range(rounds):
            drafts, previous = [], [last]
            for _ in range(self.block):
                drafts.append(draw(self.q[previous[-1]], torch.rand(rows, generator=generator)))
                previous.append(drafts[-1])
            before = torch.stack(previous, dim=1)
            confidences = self.overlap[before[:, :-1]].numpy()
            groups = confidences.reshape(-1, batch, self.block)
            lengths = np.concatenate([decide(group, number, index) for index, group in enumerate(groups)])
            verdict = verify_sampled(
                torch.stack(drafts, dim=1),
                torch.from_numpy(lengths),
                self.q[before[:, :-1]],
                self.p[before],
                torch.rand(rows, self.block + 1, generator=generator),
            )
            emitted = torch.stack([*drafts, torch.zeros_like(last)], dim=1)
            emitted.scatter_(1, verdict.accepted[:, None], verdict.next_token[:, None])
            for column in range(self.block + 1):
                writes = verdict.accepted >= column
                output[writes, length[writes] + column] = emitted[writes, column]
            length += verdict.accepted + 1
            last = verdict.next_token
        return output[:, :rounds].numpy()

    def test(self, tokens: np.ndarray) -> tuple[float, float]:
        """χ² of the joint distribution of the decoded tokens against the target's exact one."""
        size = len(self.p)
        exact = np.array([1.0])
        state = np.array([0])
        for _ in range(tokens.shape[1]):
            exact = (exact[:, None] * self.p.numpy()[state]).ravel()
            state = np.tile(np.arange(size), len(state))
        index = (tokens * size ** np.arange(tokens.shape[1])[::-1]).sum(axis=1)
        return chi_square(np.bincount(index, minlength=len(exact)), exact * len(tokens))


def table_of(speeds: list[float]) -> CostTable:
    return CostTable(
        device="here",
        target="t",
        kind="synthetic",
        context_tokens=0,
        tokens=tuple(range(1, len(speeds) + 1)),
        steps_per_second=tuple(speeds),
    )


# Accepted with probability 0.7, 1, 0.4 and 0.8 after the tokens 0 to 3.
TARGET = [[0.5, 0.3, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6], [0.2, 0.3, 0.4, 0.1]]
DRAFTER = [[0.2, 0.3, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.1, 0.1], [0.3, 0.1, 0.4, 0.2]]
CLIFFS = table_of([1.0, 1.0, 0.8, 0.62, 0.52, 0.5, 0.45, 0.44])
BATCH = 2


def causal(confidences: np.ndarray, number: int, batch: int) -> np.ndarray:
    return schedule(confidences, CLIFFS).lengths_R


def retrospective(confidences: np.ndarray, number: int, batch: int) -> np.ndarray:
    """Appendix A's counterexample: the best lengths over all prefixes, judged by this round's own confidences."""
    return best_capacity(confidences, CLIFFS).lengths_R


class Asynchronous:
    """The capacity of a round comes from the confidences of two rounds before; the first two rounds admit 3 drafts."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, confidences: np.ndarray, number: int, batch: int) -> np.ndarray:
        self.seen[number, batch] = confidences
        known = self.seen.get((number - 2, batch))
        capacity = 3 if known is None else best_capacity(known, CLIFFS).tokens - len(confidences)
        return admit_top(confidences, capacity, CLIFFS).lengths_R


@pytest.mark.parametrize("policy", ["causal", "asynchronous"])
def test_scheduled_decoding_has_the_targets_distribution(policy: str) -> None:
    chains = Chains(TARGET, DRAFTER, block=3)
    decide = causal if policy == "causal" else Asynchronous()
    last_round: set[int] = set()

    def recording(confidences: np.ndarray, number: int, batch: int) -> np.ndarray:
        decided = decide(confidences, number, batch)
        if number == 2:
            last_round.update(decided.tolist())
        return decided

    statistic, limit = chains.test(chains.decode(recording, rows=20_000, rounds=3, batch=BATCH))
    assert statistic < limit
    assert last_round == {0, 1, 2, 3}  # else the test would say nothing


def test_a_retrospective_scheduler_changes_the_distribution() -> None:
    chains = Chains(TARGET, DRAFTER, block=3)
    statistic, limit = chains.test(chains.decode(retrospective, rows=20_000, rounds=3, batch=BATCH))
    assert statistic > 5 * limit


class TestAppendixA:
    """Target (0.7, 0.3), drafter (0.5, 0.5). Verifying only where the second draft looks good makes (0.85, 0.15)."""

    chains = Chains([[0.7, 0.3], [1.0, 0.0]], [[0.5, 0.5], [0.1, 0.9]], block=2)
    cliff = table_of([1.0, 0.5, 0.48])
    rows = 20_000

    def first_tokens(self, decide: Decide) -> np.ndarray:
        """How often each token came first."""
        tokens = self.chains.decode(decide, rows=self.rows, rounds=1, batch=1)
        return np.bincount(tokens[:, 0], minlength=2)

    def test_the_retrospective_scheduler_fails(self) -> None:
        # The first draft is accepted with 0.8 whatever it is; after token 0 the second one is accepted with 0.8, after
        # token 1 with 0.1. Θ = 1 without drafts, 1.17 or 0.90 with both, so only rounds that drafted token 0 verify.
        counts = self.first_tokens(lambda c, number, batch: best_capacity(c, self.cliff).lengths_R)
        assert counts / self.rows == pytest.approx([0.85, 0.15], abs=0.01)
        statistic, limit = chi_square(counts, self.rows * np.array([0.7, 0.3]))
        assert statistic > 100 * limit

    @pytest.mark.parametrize("speeds", [[1.0, 0.5, 0.48], [1.0, 0.95, 0.52], [1.0, 0.95, 0.9]], ids=["0", "1", "2"])
    def test_the_causal_scheduler_passes(self, speeds: list[float], request: pytest.FixtureRequest) -> None:
        lengths: set[int] = set()

        def decide(confidences: np.ndarray, number: int, batch: int) -> np.ndarray:
            decided = schedule(confidences, table_of(speeds)).lengths_R
            lengths.update(decided.tolist())
            return decided

        counts = self.first_tokens(decide)
        statistic, limit = chi_square(counts, self.rows * np.array([0.7, 0.3]))
        assert statistic < limit
        assert str(max(lengths)) == request.node.callspec.id


def test_scheduled_greedy_decoding_in_a_batch_is_the_targets_own() -> None:
    runs = [RUNS[f"fitted_vanilla_b7_p{prompt}_t0.0"] for prompt in range(3)]
    requests = [Request(GOLDEN_DECODE["prompts"][run["prompt"]]) for run in runs]
    table = table_of([1 / (1 + 0.15 * tokens) for tokens in range(1, 25)])
    config = DecodeConfig(max_new_tokens=64, temperature=0.0, stop_ids=frozenset(), seed=0)
    drafter = BlockDrafter(*load_run(runs[0]))
    decoder = BatchDecoder(tiny_verifier(), drafter, config, batch_size=3, schedule=cost_schedule(table))
    results = decode_all(decoder, requests)
    for run, request, result in zip(runs, requests, results, strict=True):
        assert [*request.prompt_ids, *result.output_ids] == run["output_ids"]
    assert len({r.proposed for result in results for r in result.rounds}) > 3  # the scheduler did decide
