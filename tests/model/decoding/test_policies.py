"""What a planner may know when it decides, and how its memory follows the requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from model.decoding.cost_table import CostTable
from model.decoding.policies import POLICIES, UNKNOWN_CONFIDENCE, Planner, PlannerOptions
from model.decoding.scheduler import admit_top, best_capacity, schedule

OPTIONS = PlannerOptions(threshold=0.5, adapt_drafting=False, smooth_costs=False)
TABLE = CostTable(
    device="here",
    target="t",
    kind="synthetic",
    context_tokens=0,
    tokens=tuple(range(1, 33)),
    steps_per_second=tuple(1 / (1 + 0.06 * tokens) for tokens in range(1, 33)),
    draft_seconds=0.2,
    draft_seconds_per_token=0.01,
)
BLOCK = 4


def planner(policy: str, requests: int, options: PlannerOptions = OPTIONS, table: CostTable = TABLE) -> Planner:
    made = Planner(POLICIES[policy], BLOCK, table, options)
    made.enter(requests)
    return made


Draw = Callable[[int], np.ndarray]


@pytest.fixture
def draw() -> Draw:
    """`draw(requests)`: confidences, others at every call."""
    rng = np.random.default_rng(0)
    return lambda requests: rng.uniform(0.2, 1.0, (requests, BLOCK)).astype(np.float32)


def limits(requests: int, limit: int = BLOCK) -> np.ndarray:
    return np.full(requests, limit)


def test_static_lengths_stop_at_the_limits_and_cost_what_they_draft(draw: Draw) -> None:
    lengths, drafted = planner("static3", 3).plan(draw(3), np.array([4, 2, 0]))
    assert lengths.tolist() == [3, 2, 0]
    assert drafted == 9
    assert planner("none", 3).plan(draw(3), limits(3))[1] == 0


def test_the_threshold_stops_before_the_first_draft_below_it() -> None:
    confidences = np.array([[0.9, 0.5, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.9] * 4], np.float32)
    lengths, drafted = planner("threshold", 3).plan(confidences, np.array([4, 4, 2]))
    assert lengths.tolist() == [2, 0, 2]
    assert drafted == 12


def test_synchronous_is_algorithm_1_with_drafting_as_overhead(draw: Draw) -> None:
    confidences = draw(3)
    lengths, drafted = planner("dspark", 3).plan(confidences, limits(3))
    expected = schedule(confidences, TABLE, limits(3), overhead_seconds=TABLE.draft_cost(12))
    assert lengths.tolist() == expected.lengths_R.tolist()
    assert drafted == 12


def test_asynchronous_capacity_is_that_of_two_rounds_ago(draw: Draw) -> None:
    made = planner("dspark_async", 3)
    rounds = [draw(3) for _ in range(5)]
    overhead = TABLE.draft_cost(12)
    for number, confidences in enumerate(rounds):
        lengths, _ = made.plan(confidences, limits(3))
        if number >= 2:
            old = best_capacity(rounds[number - 2], TABLE, limits(3), overhead_seconds=overhead)
            expected = admit_top(confidences, old.tokens - 3, TABLE, limits(3))
            assert lengths.tolist() == expected.lengths_R.tolist()


def test_memory_leaves_and_enters_with_the_requests(draw: Draw) -> None:
    made = planner("dspark_async", 3)
    rounds = [draw(3) for _ in range(3)]
    mean = np.full(BLOCK, UNKNOWN_CONFIDENCE)
    for confidences in rounds[:2]:
        made.plan(confidences, limits(3))
        mean = mean + 0.1 * 3 / 16 * (confidences.mean(axis=0) - mean)
    made.leave(np.array([False, True, True]))
    made.enter(1)  # thought to be like the mean of those seen before
    known = np.stack([*rounds[0][1:].astype(np.float64), mean])
    old = best_capacity(known, TABLE, limits(3), overhead_seconds=TABLE.draft_cost(12))
    lengths, _ = made.plan(rounds[2], limits(3))
    assert lengths.tolist() == admit_top(rounds[2], old.tokens - 3, TABLE, limits(3)).lengths_R.tolist()
    wrong_rows = np.stack([*rounds[0][:2].astype(np.float64), mean])
    other = best_capacity(wrong_rows, TABLE, limits(3), overhead_seconds=TABLE.draft_cost(12))
    assert other.tokens != old.tokens  # else the test would not see rows mixed up


@pytest.mark.parametrize("policy", ["dspark", "dspark_async"])
def test_what_to_draft_is_decided_before_this_rounds_confidences(policy: str, draw: Draw) -> None:
    options = replace(OPTIONS, adapt_drafting=True)
    one, other = planner(policy, 8, options), planner(policy, 8, options)
    for _ in range(20):
        shared = draw(8)
        assert one.plan(shared, limits(8))[1] == other.plan(shared, limits(8))[1]
    assert (
        one.plan(np.full((8, BLOCK), 0.99, np.float32), limits(8))[1]
        == (other.plan(np.full((8, BLOCK), 0.01, np.float32), limits(8))[1])
    )


def test_drafting_shrinks_to_what_pays() -> None:
    options = replace(OPTIONS, adapt_drafting=True)
    # The first draft is nearly sure, the others are hopeless: two positions drafted are one too many.
    sure = np.tile(np.array([0.95, 0.05, 0.05, 0.05], np.float32), (8, 1))
    dear = replace(TABLE, draft_seconds=0.0, draft_seconds_per_token=0.03)
    made = planner("dspark", 8, options, dear)
    assert made.plan(sure, limits(8))[1] == 8 * BLOCK  # nothing is known yet
    assert made.plan(sure, limits(8))[1] == 8
    never = planner("dspark", 8, options, replace(TABLE, draft_seconds=10.0))
    never.plan(sure, limits(8))
    lengths, drafted = never.plan(sure, limits(8))
    assert (lengths.tolist(), drafted) == ([0] * 8, 0)
    assert any(never.plan(sure, limits(8))[1] for _ in range(600))  # looked at again
