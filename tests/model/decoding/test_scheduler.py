"""The scheduler against Algorithm 1 in plain Python, its borders, and what it may not look at."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduler import plain_schedule
from model.decoding.cost_table import CostTable
from model.decoding.scheduler import Schedule, admit_top, best_capacity, schedule, schedule_one, warm_up
from model.errors import DecodingError


def table_of(speeds: list[float]) -> CostTable:
    """A table with one entry per token count."""
    return CostTable(
        device="here",
        target="t",
        kind="synthetic",
        context_tokens=0,
        tokens=tuple(range(1, len(speeds) + 1)),
        steps_per_second=tuple(speeds),
    )


WORKED = table_of([1.0, 0.95, 0.52, 0.48])
FLAT = table_of([100.0] * 64)


def rows(*values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


class Case(NamedTuple):
    confidences: np.ndarray
    table: CostTable
    limits: np.ndarray
    overhead: float


CONFIDENCE = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, math.nan, -0.25, 1.5]), st.floats(0, 1, width=32), st.floats(0.5, 1, width=32)
)


@st.composite
def cases(draw: Any, confidence: st.SearchStrategy[float] = CONFIDENCE) -> Case:
    """Batches of up to 6 requests of up to 5 drafts; tables with plateaus, cliffs and even speed-ups."""
    requests, block = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    row = st.lists(confidence, min_size=block, max_size=block)
    values = draw(st.lists(row, min_size=requests, max_size=requests))
    extra = draw(st.integers(0, requests * block + 2))
    drops = draw(st.lists(st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 1.1]), min_size=requests + extra))
    limits = draw(st.lists(st.integers(-1, block), min_size=requests, max_size=requests))
    speeds = np.cumprod(drops[: requests + extra]) * 10
    return Case(rows(*values), table_of(speeds.tolist()), np.array(limits), draw(st.sampled_from([0.0, 0.3])))


def test_worked_example() -> None:
    # Θ = 1.00, 0.95 x 1.8 = 1.71, 0.52 x 2.36 = 1.23: the second draft lowers it.
    confidences = rows([0.8, 0.7, 0.9])
    found = schedule(confidences, WORKED)
    assert found.lengths_R.tolist() == [1]
    assert found.tokens == 2
    assert found.expected_tokens == pytest.approx(1.8)
    assert found.tokens_per_second == pytest.approx(1.71)
    assert schedule_one(confidences[0], WORKED) == 1
    assert schedule(confidences, WORKED, np.array([0])).tokens_per_second == pytest.approx(1.0)


@given(cases())
def test_equals_plain_algorithm_1(case: Case) -> None:
    found = schedule(case.confidences, case.table, case.limits, overhead_seconds=case.overhead)
    plain = plain_schedule(
        case.confidences.tolist(), case.table.seconds_B.tolist(), case.limits.tolist(), case.overhead
    )
    assert found.lengths_R.tolist() == plain.lengths
    assert (found.expected_tokens, found.tokens_per_second) == (plain.expected_tokens, plain.tokens_per_second)
    assert found.tokens == len(case.confidences) + sum(plain.lengths) <= case.table.max_tokens


@given(cases())
def test_a_request_alone_is_a_batch_of_one(case: Case) -> None:
    one, limit = case.confidences[:1], case.limits[:1]
    expected = schedule(one, case.table, limit, overhead_seconds=case.overhead).lengths_R[0]
    assert schedule_one(one[0], case.table, int(limit[0]), case.overhead) == expected


def test_float64_is_scheduled_like_float32() -> None:
    single = np.random.default_rng(0).uniform(0.4, 1, (9, 5)).astype(np.float32)
    table = table_of((100 - 0.5 * np.arange(64)).tolist())
    assert schedule(single.astype(np.float64), table).lengths_R.tolist() == schedule(single, table).lengths_R.tolist()


@given(cases(), st.data())
def test_later_confidences_never_change_an_earlier_decision(case: Case, data: st.DataObject) -> None:
    block = case.confidences.shape[1]
    request = data.draw(st.integers(0, len(case.confidences) - 1))
    position = data.draw(st.integers(0, block))
    changed = case.confidences.copy()
    changed[request, position:] = data.draw(st.lists(CONFIDENCE, min_size=block - position, max_size=block - position))
    capacity = data.draw(st.integers(0, case.confidences.size))
    decisions: list[Callable[[np.ndarray], Schedule]] = [
        lambda c: schedule(c, case.table, case.limits, overhead_seconds=case.overhead),
        lambda c: admit_top(c, capacity, case.table, case.limits),
    ]
    for decide in decisions:
        before, after = decide(case.confidences).lengths_R[request], decide(changed).lengths_R[request]
        assert min(before, position) == min(after, position)


def test_the_capacity_search_does_look_ahead() -> None:
    # Behind the cliff at 2 tokens a high second confidence pays for both drafts, a low one for none: used on this
    # round's own confidences the search would be the retrospective scheduler of Appendix A.
    table = table_of([1.0, 0.5, 0.48])
    assert best_capacity(rows([0.8, 0.9]), table).lengths_R.tolist() == [2]
    assert best_capacity(rows([0.8, 0.1]), table).lengths_R.tolist() == [0]
    assert schedule(rows([0.8, 0.9]), table).lengths_R.tolist() == [0]


@given(cases(), st.integers(0, 3))
def test_capacity_is_the_highest_point_of_all_prefixes(case: Case, joining: int) -> None:
    requests = min(len(case.confidences) + joining, case.table.max_tokens)
    found = best_capacity(case.confidences, case.table, case.limits, requests=requests, overhead_seconds=case.overhead)
    survivals = sorted(survivals_of(case), reverse=True)[: case.table.max_tokens - requests]
    expected = requests + np.cumsum([0.0, *survivals])
    rates = [
        tokens / (case.table.seconds_B[requests - 1 + count] + case.overhead) for count, tokens in enumerate(expected)
    ]
    assert found.tokens_per_second == pytest.approx(max(rates))
    assert rates[found.tokens - requests] == pytest.approx(max(rates))
    assert found.lengths_R.sum() == found.tokens - requests


@given(cases(), st.integers(0, 40))
def test_top_drafts_are_those_with_the_highest_survival(case: Case, capacity: int) -> None:
    found = admit_top(case.confidences, capacity, case.table, case.limits)
    survivals = sorted(survivals_of(case), reverse=True)
    room = min(capacity, len(survivals), case.table.max_tokens - len(case.confidences))
    assert found.lengths_R.sum() == room
    assert found.expected_tokens == pytest.approx(len(case.confidences) + sum(survivals[:room]))
    assert found.tokens_per_second == pytest.approx(found.expected_tokens * case.table.at(found.tokens))


def survivals_of(case: Case) -> list[float]:
    """Survival of every draft that may be admitted."""
    found = []
    for row, limit in zip(case.confidences.tolist(), case.limits.tolist(), strict=True):
        survival = 1.0
        for confidence in row[: max(limit, 0)]:
            survival *= confidence if 0 < confidence <= 1 else 0.0
            if not survival > 0:
                break
            found.append(survival)
    return found


def test_equal_survivals_go_to_the_first_request_and_stay_in_order() -> None:
    tied = rows([0.5, 1.0], [0.5, 1.0])
    assert admit_top(tied, 1, FLAT).lengths_R.tolist() == [1, 0]
    assert admit_top(tied, 2, FLAT).lengths_R.tolist() == [2, 0]
    assert admit_top(tied, 3, FLAT).lengths_R.tolist() == [2, 1]
    for capacity in range(8):
        lengths = admit_top(np.full((7, 1), 0.5, np.float32), capacity, FLAT).lengths_R.tolist()
        assert lengths == [1] * capacity + [0] * (7 - capacity)


@given(cases(st.sampled_from([0.5, 1.0])), st.integers(0, 40))
def test_ties_are_broken_by_request_whatever_the_capacity(case: Case, capacity: int) -> None:
    drafts = [
        (-float(np.prod(row[: position + 1])), request)
        for request, row in enumerate(case.confidences)
        for position in range(max(case.limits[request], 0))
    ]
    room = min(capacity, case.table.max_tokens - len(case.confidences))
    taken = [request for _, request in sorted(drafts)[:room]]
    expected = [taken.count(request) for request in range(len(case.confidences))]
    assert admit_top(case.confidences, capacity, case.table, case.limits).lengths_R.tolist() == expected


def test_an_equal_objective_is_no_gain() -> None:
    assert schedule(rows([1.0]), table_of([1.0, 0.5])).lengths_R.tolist() == [0]  # Θ = 1 either way
    assert schedule_one(rows([1.0])[0], table_of([1.0, 0.5])) == 0


@pytest.mark.parametrize("nonsense", [math.nan, -0.1, 1.1, math.inf])
def test_what_is_no_probability_ends_its_request_and_is_counted(nonsense: float) -> None:
    found = schedule(rows([0.9, nonsense, 0.9], [0.9, 0.9, 0.9]), FLAT)
    assert found.lengths_R.tolist() == [1, 3]
    assert found.invalid == 1
    assert schedule(rows([nonsense], [0.0]), FLAT).invalid == 1
    assert admit_top(rows([0.9, nonsense]), 2, FLAT).lengths_R.tolist() == [1]
    assert schedule_one(rows([0.9, nonsense, 0.9])[0], FLAT) == 1


def test_a_hopeless_draft_is_not_verified_even_where_it_is_free() -> None:
    found = schedule(rows([0.9, 0.0, 0.9]), FLAT)
    assert (found.lengths_R.tolist(), found.invalid) == ([1], 0)
    assert admit_top(rows([0.9, 0.0, 0.9]), 3, FLAT).lengths_R.tolist() == [1]


def test_limits_bound_each_request() -> None:
    found = schedule(np.ones((4, 3), np.float32), FLAT, np.array([0, 1, 3, -2]))
    assert found.lengths_R.tolist() == [0, 1, 3, 0]
    assert schedule_one(np.ones(3, np.float32), FLAT, 2) == 2
    assert schedule_one(np.ones(3, np.float32), FLAT, 9) == 3


def test_no_step_grows_beyond_the_table() -> None:
    confidences = np.ones((4, 3), np.float32)
    assert schedule(confidences, table_of([1.0] * 6)).lengths_R.tolist() == [2, 0, 0, 0]
    assert schedule(confidences, table_of([1.0] * 4)).lengths_R.tolist() == [0, 0, 0, 0]
    assert best_capacity(confidences, table_of([1.0] * 6)).tokens == 6
    assert admit_top(confidences, 99, table_of([1.0] * 6)).tokens == 6
    with pytest.raises(DecodingError, match="a step of 4 requests: the cost table of t on here covers 1 to 3 tokens"):
        schedule(confidences, table_of([1.0] * 3))


def test_overhead_makes_longer_verification_worth_it() -> None:
    confidences = rows([0.8, 0.7, 0.9])
    assert schedule(confidences, WORKED).lengths_R.tolist() == [1]
    assert schedule(confidences, WORKED, overhead_seconds=10.0).lengths_R.tolist() == [3]


@pytest.mark.parametrize(
    ("confidences", "limits", "message"),
    [
        (np.ones(3, np.float32), None, r"float32 \[3\]; wanted contiguous float \[R,K\]"),
        (np.ones((2, 3), np.int64), None, "int64"),
        (np.ones((3, 2), np.float32).T, None, "contiguous"),
        (np.ones((2, 3), np.float32), np.array([1]), r"limits are int64 \[1\] up to 1; wanted int64 \[2\] up to 3"),
        (np.ones((2, 3), np.float32), np.array([1, 4]), "up to 4"),
        (np.ones((2, 3), np.float32), np.array([1.0, 2.0]), "float64"),
        (np.ones((0, 3), np.float32), None, "a step of 0 requests"),
    ],
)
def test_wrong_arrays_are_refused(confidences: np.ndarray, limits: np.ndarray | None, message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        schedule(confidences, FLAT, limits)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(DecodingError, match="capacity is -1"):
        admit_top(rows([0.5]), -1, FLAT)


def test_numba_is_imported_by_the_first_decision_only() -> None:
    code = "import sys, model.decoding.scheduler as s; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warm_up_compiles_what_decisions_use() -> None:
    from model.decoding import scheduler_kernels

    warm_up()
    compiled = len(scheduler_kernels.admit_batch.signatures), len(scheduler_kernels.admit_one.signatures)
    schedule(rows([0.5, 0.5]), WORKED, np.array([1]), overhead_seconds=0.1)
    best_capacity(rows([0.5, 0.5]), WORKED)
    admit_top(rows([0.5, 0.5]), 1, WORKED)
    schedule_one(rows([0.5, 0.5])[0], WORKED, 1)
    assert (len(scheduler_kernels.admit_batch.signatures), len(scheduler_kernels.admit_one.signatures)) == compiled
