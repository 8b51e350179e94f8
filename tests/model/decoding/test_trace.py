from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.decoding.trace import ParametricAcceptance, Trace, parametric_trace
from model.errors import DecodingError

FORMULA = ParametricAcceptance(
    block_size=5,
    first=0.8,
    decay=0.2,
    request_spread=0.5,
    round_spread=0.8,
    draft_spread=0.5,
    overconfidence=1.0,
    requests=400,
    rounds_per_request=40,
    mean_output_tokens=100,
)


def parts() -> dict[str, Any]:
    return {
        "confidences_NK": np.full((3, 2), 0.5, np.float32),
        "accepted_N": np.array([0, 1, 2]),
        "first_round_Q": np.array([0, 2]),
        "output_tokens_Q": np.array([5, 5]),
    }


def test_a_trace_knows_its_shape() -> None:
    trace = Trace(**parts())
    assert trace.block_size == 2
    assert trace.rounds_Q.tolist() == [2, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"accepted_N": np.array([0, 1])},
        {"accepted_N": np.array([0, 1, 3])},
        {"accepted_N": np.array([0, -1, 2])},
        {"first_round_Q": np.array([0, 3])},
        {"first_round_Q": np.array([1, 2])},
        {"first_round_Q": np.array([], dtype=int), "output_tokens_Q": np.array([], dtype=int)},
        {"output_tokens_Q": np.array([5, 0])},
        {"output_tokens_Q": np.array([5])},
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DecodingError, match="does not fit together"):
        Trace(**(parts() | change))


def test_calibrated_confidences_are_what_happens() -> None:
    trace = parametric_trace(FORMULA, seed=1)
    for position in range(trace.block_size):
        reached = trace.accepted_N >= position
        accepted = trace.accepted_N[reached] > position
        confidence = trace.confidences_NK[reached, position]
        assert accepted.mean() == pytest.approx(confidence.mean(), abs=0.015)
        sure = confidence > 0.9
        assert accepted[sure].mean() == pytest.approx(confidence[sure].mean(), abs=0.02)


def test_overconfidence_changes_what_is_said_and_not_what_happens() -> None:
    calibrated, boasting = (parametric_trace(replace(FORMULA, overconfidence=factor), seed=1) for factor in (1.0, 2.0))
    assert (boasting.accepted_N == calibrated.accepted_N).all()
    odds = calibrated.confidences_NK / (1 - calibrated.confidences_NK)
    np.testing.assert_allclose(boasting.confidences_NK, odds**2 / (1 + odds**2), atol=1e-4)


def test_acceptance_falls_with_the_position_and_a_seed_is_a_trace() -> None:
    trace = parametric_trace(FORMULA, seed=1)
    assert (np.diff(trace.confidences_NK.mean(axis=0)) < 0).all()
    assert (parametric_trace(FORMULA, seed=1).accepted_N == trace.accepted_N).all()
    assert (parametric_trace(FORMULA, seed=2).accepted_N != trace.accepted_N).any()
    assert trace.output_tokens_Q.mean() == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    "change", [{"first": 1.0}, {"overconfidence": 0.0}, {"requests": 0}, {"mean_output_tokens": 1}]
)
def test_parameters_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DecodingError, match="out of range"):
        replace(FORMULA, **change)
