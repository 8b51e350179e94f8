"""Calibration on synthetic rounds whose truth is known, and its metrics against plain definitions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.decoding.calibration import (
    BINS,
    LEAST_REACHED,
    Calibration,
    Rounds,
    expected_calibration_error,
    fit_shared_temperature,
    fit_temperatures,
    from_json,
    measure,
    measure_positions,
    scale,
)
from model.errors import CalibrationError

K = 5


def synthetic(count: int, *, factor: float | tuple[float, ...], seed: int) -> Rounds:
    """Rounds whose true conditional acceptance is p_k; the confidences are σ(factor_k · logit p_k)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, K, generator=generator, dtype=torch.float64) * 1.2 + 1.0
    accepts = torch.rand(count, K, generator=generator, dtype=torch.float64) < torch.sigmoid(logits)
    survived = accepts.long().cumprod(dim=1).bool()
    factors = torch.tensor(factor, dtype=torch.float64).expand(K)
    return Rounds(torch.sigmoid(factors * logits), survived, torch.ones_like(survived))


def worst_prefix_ece(rounds: Rounds, temperatures: tuple[float, ...] | None) -> float:
    return max(q.prefix.ece for q in measure_positions(rounds, temperatures) if q.prefix)


def test_doubled_logits_are_halved_at_every_position_and_the_products_become_calibrated() -> None:
    fitted = fit_temperatures(synthetic(20_000, factor=2.0, seed=0))
    assert fitted == pytest.approx((2.0,) * K, rel=0.15)
    held_out = synthetic(20_000, factor=2.0, seed=1)
    assert worst_prefix_ece(held_out, None) > 0.05
    assert worst_prefix_ece(held_out, fitted) < 0.02


def test_every_position_gets_its_own_temperature() -> None:
    factors = (0.5, 1.0, 3.0, 1.0, 2.0)
    assert fit_temperatures(synthetic(20_000, factor=factors, seed=2)) == pytest.approx(factors, rel=0.2)


def test_calibrated_confidences_are_left_alone() -> None:
    rounds = synthetic(40_000, factor=1.0, seed=3)
    assert fit_temperatures(rounds) == pytest.approx((1.0,) * K, rel=0.2)
    assert fit_shared_temperature(rounds) == pytest.approx(1.0, rel=0.1)


def test_one_temperature_for_all_positions() -> None:
    assert fit_shared_temperature(synthetic(20_000, factor=2.0, seed=4)) == pytest.approx(2.0, rel=0.1)


def test_what_was_not_decided_does_not_count() -> None:
    rounds = synthetic(4000, factor=2.0, seed=5)
    # Behind position 2 nothing was verified in half of the rounds; what stands there must not matter.
    known = rounds.known_NK.clone()
    known[::2, 2:] = False
    spoiled = rounds.survived_NK.clone()
    spoiled[::2, 2:] = ~spoiled[::2, 2:]
    partial = Rounds(rounds.confidences_NK, rounds.survived_NK, known)
    assert fit_temperatures(partial) == fit_temperatures(Rounds(rounds.confidences_NK, spoiled, known))
    nothing = Rounds(rounds.confidences_NK, rounds.survived_NK, known & (torch.arange(K) < 4))
    assert fit_temperatures(nothing)[4] == fit_temperatures(nothing)[3]
    assert measure_positions(nothing)[4].prefix is None


def test_a_position_that_hardly_any_round_reached_takes_the_temperature_before() -> None:
    rounds = synthetic(4000, factor=2.0, seed=6)
    few = torch.arange(4000) < LEAST_REACHED - 1
    survived = rounds.survived_NK & (few[:, None] | (torch.arange(K) < 2))  # position 4 is reached by fewer still
    fitted = fit_temperatures(Rounds(rounds.confidences_NK, survived, rounds.known_NK))
    assert fitted[2] != fitted[1]
    assert fitted[3] == fitted[4] == fitted[2]
    nowhere = Rounds(rounds.confidences_NK[:9], rounds.survived_NK[:9], rounds.known_NK[:9])
    assert fit_temperatures(nowhere) == (1.0,) * K


def test_rounds_from_counts_know_what_verification_decided() -> None:
    # All 3 verified and 1 accepted; a stop token ended the second after 2; the threshold held the third's last back.
    rounds = Rounds.from_counts([[0.9, 0.8, 0.7]] * 3, accepted=[1, 2, 2], proposed=[3, 2, 2])
    assert rounds.survived_NK.tolist() == [[True, False, False], [True, True, False], [True, True, False]]
    assert rounds.known_NK.tolist() == [[True, True, True], [True, True, False], [True, True, False]]


def test_scaling_keeps_order_and_saturated_confidences_finite() -> None:
    confidences = torch.tensor([[0.0, 0.1], [0.5, 0.6], [1.0, 0.9]], dtype=torch.float64)
    scaled = scale(confidences, (2.0, 0.5))
    assert bool(torch.isfinite(scaled).all())
    assert bool((scaled.diff(dim=0) > 0).all())
    assert float(scaled[1, 0]) == pytest.approx(0.5)
    with pytest.raises(CalibrationError, match="3 temperatures for 2 draft positions"):
        scale(confidences, (1.0, 1.0, 1.0))


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_metrics_are_their_definitions(pairs: list[tuple[float, bool]]) -> None:
    p = np.array([pair[0] for pair in pairs])
    y = np.array([pair[1] for pair in pairs])
    quality = measure(torch.from_numpy(p), torch.from_numpy(y))
    edges = np.minimum((p * BINS).astype(int), BINS - 1)
    ece = sum(
        (edges == m).sum() * abs(p[edges == m].mean() - y[edges == m].mean()) for m in range(BINS) if (edges == m).any()
    ) / len(p)
    assert quality.ece == pytest.approx(ece, abs=1e-12)
    assert quality.brier == pytest.approx(((p - y) ** 2).mean())
    assert sum(b.count for b in quality.bins) == quality.count == len(p)
    wins = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    if wins:
        assert quality.auroc == pytest.approx(np.mean(wins))
    else:
        assert quality.auroc is None


def test_ece_of_many_temperatures_at_once_is_that_of_each() -> None:
    predicted = torch.rand(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    events = (torch.rand(50, generator=torch.Generator().manual_seed(1)) < 0.5).double()
    together = expected_calibration_error(predicted, events)
    assert together.tolist() == pytest.approx([measure(row, events).ece for row in predicted])


def make_calibration() -> Calibration:
    rounds = synthetic(50, factor=2.0, seed=0)
    fitted = fit_temperatures(rounds)
    return Calibration(
        temperatures=fitted,
        fitted_on={"rounds": 50},
        before=measure_positions(rounds),
        after=measure_positions(rounds, fitted),
    )


def test_file_round_trip_and_its_version() -> None:
    calibration = make_calibration()
    text = calibration.to_json()
    assert from_json(text, source="x") == calibration
    with pytest.raises(CalibrationError, match="x: calibration version 2, this program reads 1"):
        from_json(json.dumps(json.loads(text) | {"version": 2}), source="x")
    with pytest.raises(CalibrationError, match="x: not a calibration: KeyError"):
        from_json("{}", source="x")
    for bad in ([1.0, 0.0], [float("nan")], [], "2", [True and "a"]):
        with pytest.raises(CalibrationError, match="temperatures"):
            from_json(json.dumps(json.loads(text) | {"temperatures": bad}), source="x")


def test_rounds_must_be_rectangular_probabilities() -> None:
    with pytest.raises(CalibrationError, match="outside"):
        Rounds.from_counts([[1.5]], accepted=[0], proposed=[1])
    with pytest.raises(CalibrationError, match="no rounds with confidences"):
        Rounds.from_counts([], accepted=[], proposed=[])
