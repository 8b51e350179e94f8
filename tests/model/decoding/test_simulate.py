"""The simulated engine by hand-made traces, and the shape of the paper's Figures 7 and 8."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from model.decoding.cost_table import CostTable, Roofline, roofline_table
from model.decoding.policies import POLICIES, PlannerOptions
from model.decoding.simulate import Load, Point, simulate
from model.decoding.trace import ParametricAcceptance, Trace, parametric_trace
from model.errors import DecodingError

OPTIONS = PlannerOptions(threshold=0.5, adapt_drafting=True, smooth_costs=True)
LOAD = Load(concurrency=1, requests=20, arrivals_per_second=None, options=OPTIONS, seed=0)
LINEAR = CostTable(
    device="here",
    target="t",
    kind="synthetic",
    context_tokens=0,
    tokens=tuple(range(1, 65)),
    steps_per_second=tuple(1.0 / (1.0 + 0.1 * tokens) for tokens in range(1, 65)),
    draft_seconds=0.5,
    draft_seconds_per_token=0.01,
)
FORMULA = ParametricAcceptance(
    block_size=7,
    first=0.85,
    decay=0.15,
    request_spread=0.6,
    round_spread=1.0,
    draft_spread=0.6,
    overconfidence=1.0,
    requests=256,
    rounds_per_request=48,
    mean_output_tokens=160,
)


def constant_trace(accepted: int, confidence: float, *, block: int = 4, tokens: int = 12) -> Trace:
    """One kind of round only."""
    return Trace(
        confidences_NK=np.full((3, block), confidence, np.float32),
        accepted_N=np.full(3, accepted),
        first_round_Q=np.array([0]),
        output_tokens_Q=np.array([tokens]),
    )


def gpu_like() -> CostTable:
    """Steps of 8 tokens, flat to about 100 tokens, then proportional: a 4B target on a large GPU."""
    line = Roofline(
        weight_bytes=8e9, flops_per_token=8e9, bandwidth=3.8e12, compute=5.5e14, launch_seconds=3e-4, sharpness=4.0
    )
    draft = replace(line, weight_bytes=1.9e9, flops_per_token=1.9e9, launch_seconds=1e-4)
    return roofline_table(line, device="gpu", target="4B", sizes=[1, 2, 4, *range(8, 1025, 8)], draft=draft)


@pytest.mark.parametrize(
    ("policy", "verified", "emitted", "drafted"),
    [("none", 0, 1, 0), ("mtp1", 1, 2, 1), ("static3", 3, 3, 3), ("threshold", 4, 3, 4)],
)
def test_time_and_tokens_of_one_request_by_hand(policy: str, verified: int, emitted: int, drafted: int) -> None:
    # Two drafts of a block are right. 12 tokens divide evenly by what a round commits; at the end fewer drafts are of
    # use than the block has, which is why the last round of each request differs.
    trace = constant_trace(2, 0.9)
    point = simulate(trace, LINEAR, policy, LOAD)
    rounds = 12 // emitted
    last = min(verified, emitted - 1)
    seconds = (rounds - 1) * (1.1 + 0.1 * verified) + (1.1 + 0.1 * last) + rounds * LINEAR.draft_cost(drafted)
    assert point.accepted_length == pytest.approx(emitted)
    assert point.budget == pytest.approx(((rounds - 1) * verified + last) / rounds)
    assert point.tokens_per_second == pytest.approx(12 / seconds)
    assert point.tokens_per_second_per_user == pytest.approx(12 / seconds)
    assert point.seconds == pytest.approx(20 * seconds)
    assert point.drafted_steps == float(drafted > 0)


def test_a_request_never_commits_more_than_it_asked_for() -> None:
    point = simulate(constant_trace(4, 0.9, tokens=7), LINEAR, "dspark", LOAD)
    assert point.accepted_length == pytest.approx(7 / 2)


def test_users_share_a_step() -> None:
    point = simulate(constant_trace(0, 0.9), LINEAR, "none", replace(LOAD, concurrency=8, requests=80))
    assert point.step_tokens == 8
    assert point.tokens_per_second == pytest.approx(8 / 1.8)
    assert point.tokens_per_second_per_user == pytest.approx(1 / 1.8)


def test_few_arrivals_leave_the_engine_idle_and_nobody_waiting() -> None:
    trace = constant_trace(0, 0.9)
    point = simulate(trace, LINEAR, "none", replace(LOAD, concurrency=8, requests=1600, arrivals_per_second=0.001))
    assert point.tokens_per_second == pytest.approx(12 * 0.001, rel=0.1)
    assert point.tokens_per_second_per_user == pytest.approx(1 / 1.1, rel=0.02)
    assert point.queue_seconds < 0.1


def test_more_arrivals_than_the_engine_serves_make_a_queue() -> None:
    trace = constant_trace(0, 0.9)
    overloaded = replace(LOAD, concurrency=4, requests=200, arrivals_per_second=10.0)
    point = simulate(trace, LINEAR, "none", overloaded)
    assert point.tokens_per_second == pytest.approx(4 / 1.4, rel=0.01)
    assert point.queue_seconds > 100


def test_the_same_seed_is_the_same_simulation() -> None:
    trace, table = parametric_trace(FORMULA, 0), gpu_like()
    load = replace(LOAD, concurrency=8, arrivals_per_second=50.0)
    first, again = (simulate(trace, table, "dspark_async", load) for _ in range(2))
    assert asdict(first) == asdict(again)
    assert asdict(simulate(trace, table, "dspark_async", replace(load, seed=1))) != asdict(first)


@pytest.mark.parametrize(
    ("policy", "load", "message"),
    [
        ("fast", LOAD, "policy 'fast' is unknown; wanted one of none, mtp1"),
        ("static7", LOAD, "policy static7 verifies 7 drafts, the trace has 4"),
        ("static3", replace(LOAD, concurrency=17), "17 requests make steps of up to 68 tokens, .* ends at 64"),
    ],
)
def test_impossible_simulations_are_refused(policy: str, load: Load, message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        simulate(constant_trace(2, 0.9), LINEAR, policy, load)


@pytest.mark.parametrize("change", [{"concurrency": 0}, {"requests": 0}, {"arrivals_per_second": 0.0}])
def test_impossible_loads_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DecodingError, match="out of range"):
        replace(LOAD, **change)


USERS = (2, 16, 32, 64, 128)


@pytest.fixture(scope="module")
def figure() -> dict[tuple[str, int], Point]:
    """Every policy under every load on the GPU-like table."""
    trace, table = parametric_trace(FORMULA, 0), gpu_like()
    return {
        (policy, users): simulate(trace, table, policy, replace(LOAD, concurrency=users, requests=2 * users + 24))
        for policy in POLICIES
        for users in USERS
    }


@pytest.mark.parametrize("adaptive", ["dspark", "dspark_async"])
@pytest.mark.parametrize("users", USERS)
def test_dspark_is_never_below_a_baseline(figure: dict[tuple[str, int], Point], adaptive: str, users: int) -> None:
    # 2 %: what probing and the last steps of a short simulation may cost.
    best = max(figure[policy, users].tokens_per_second for policy in POLICIES if not policy.startswith("dspark"))
    assert figure[adaptive, users].tokens_per_second > 0.98 * best


@pytest.mark.parametrize("adaptive", ["dspark", "dspark_async"])
def test_the_budget_shrinks_under_load(figure: dict[tuple[str, int], Point], adaptive: str) -> None:
    budgets = [figure[adaptive, users].budget for users in USERS]
    assert all(later < earlier for earlier, later in itertools.pairwise(budgets))
    assert 4 < budgets[1] < 6
    assert budgets[0] > 6
    assert budgets[-1] < 1


def test_long_static_drafts_fall_below_plain_decoding_under_load(figure: dict[tuple[str, int], Point]) -> None:
    gains = [figure["static7", users].tokens_per_second / figure["none", users].tokens_per_second for users in USERS]
    assert gains[0] > 2.5
    assert gains[-1] < 0.8


def test_adaptive_beats_every_fixed_length_in_between(figure: dict[tuple[str, int], Point]) -> None:
    best = max(figure[policy, 32].tokens_per_second for policy in ("none", "mtp1", "static3", "static5", "static7"))
    assert figure["dspark", 32].tokens_per_second > 1.02 * best


def test_cliffs_stop_algorithm_1_unless_they_are_smoothed() -> None:
    trace, table = parametric_trace(FORMULA, 0), gpu_like()
    load = replace(LOAD, concurrency=32, requests=64)
    raw = simulate(trace, table, "dspark", replace(load, options=replace(OPTIONS, smooth_costs=False)))
    smooth = simulate(trace, table, "dspark", load)
    assert smooth.tokens_per_second > 1.05 * raw.tokens_per_second
    assert smooth.budget > raw.budget + 1


def test_overconfidence_costs_throughput_where_verification_is_dear() -> None:
    load = replace(LOAD, concurrency=64, requests=128)
    speeds = [
        simulate(parametric_trace(replace(FORMULA, overconfidence=factor), 0), gpu_like(), "dspark", load)
        for factor in (1.0, 3.0)
    ]
    assert speeds[0].tokens_per_second > 1.02 * speeds[1].tokens_per_second
    assert speeds[0].budget < speeds[1].budget


def test_drafting_stops_where_it_never_pays_and_is_tried_again_rarely() -> None:
    dear = replace(LINEAR, draft_seconds=50.0)
    point = simulate(constant_trace(0, 0.1, tokens=400), dear, "dspark", LOAD)
    assert point.drafted_steps < 0.01
    always = replace(LOAD, options=replace(OPTIONS, adapt_drafting=False))
    assert simulate(constant_trace(0, 0.1, tokens=400), dear, "dspark", always).drafted_steps == 1.0
