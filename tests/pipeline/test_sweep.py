"""Replaying rounds with a threshold, checked against rounds whose outcome is obvious."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sweep import calibrated, sweep_thresholds
from tests.pipeline.test_acceptance import make_round

CONFIDENCES = (0.9, 0.6, 0.3)


def test_a_threshold_holds_back_drafts_and_only_what_they_would_have_given() -> None:
    rounds = [make_round(3, confidences=CONFIDENCES), make_round(0, confidences=CONFIDENCES)]
    everything, some, nothing = sweep_thresholds(rounds, (0.0, 0.5, 0.95))
    assert (everything.verified, everything.accepted_length, everything.verify_rate) == (3.0, 2.5, 0.5)
    assert (some.verified, some.accepted_length, some.verify_rate) == (2.0, 2.0, 0.5)
    assert (nothing.verified, nothing.accepted_length, nothing.verify_rate) == (0.0, 1.0, None)


def test_a_stopped_round_keeps_its_missing_bonus_unless_it_is_cut_before() -> None:
    stopped = make_round(2, stopped=True, confidences=CONFIDENCES)
    whole, cut = sweep_thresholds([stopped], (0.5, 0.8))
    assert (whole.verified, whole.accepted_length) == (2.0, 2.0)
    assert (cut.verified, cut.accepted_length) == (1.0, 2.0)


def test_temperatures_are_kept_apart_and_rounds_without_confidences_left_out() -> None:
    rounds = [make_round(1, confidences=CONFIDENCES), make_round(1, confidences=CONFIDENCES, temperature=1.0)]
    assert [p.temperature for p in sweep_thresholds(rounds, (0.0,))] == [0.0, 1.0]
    assert sweep_thresholds([make_round(1)]) == []


def test_thresholds_apply_to_calibrated_confidences() -> None:
    rounds = [make_round(3, confidences=CONFIDENCES)]
    assert calibrated(rounds, ()) is rounds
    mild = calibrated(rounds, (1.0, 1.0, 0.1))  # 0.3 becomes nearly 0, the others stay
    assert mild[0].confidences[:2] == pytest.approx(CONFIDENCES[:2])
    assert [sweep_thresholds(rows, (0.1,))[0].verified for rows in (rounds, mild)] == [3.0, 2.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.floats(0, 1), min_size=3, max_size=3)), min_size=1))
def test_a_higher_threshold_never_verifies_or_commits_more(rounds: list[tuple[int, list[float]]]) -> None:
    rows = [make_round(accepted, confidences=tuple(confidences)) for accepted, confidences in rounds]
    points = sweep_thresholds(rows)
    assert points[0].accepted_length == pytest.approx(sum(row.emitted for row in rows) / len(rows))
    for low, high in itertools.pairwise(points):
        assert high.verified <= low.verified
        assert high.accepted_length <= low.accepted_length
