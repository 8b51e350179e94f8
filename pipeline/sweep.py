"""What a confidence threshold would have done, from recorded rounds. Pure functions.

A recorded round says how many drafts the target accepts; verifying fewer of them changes nothing about those that
remain, so the round's outcome at any higher threshold is known exactly: min(accepted, verified) drafts and one more
token. What is not replayed is where the following rounds would have started: the means are over the recorded rounds.
Measure one threshold for real with `evaluation.confidence_threshold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from model.decoding.calibration import scale
from pipeline.acceptance import RoundRow

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """Means per round at one threshold."""

    temperature: float
    threshold: float
    verified: float
    """Drafts sent to the target."""
    accepted_length: float
    """τ, bonus token included."""
    verify_rate: float | None
    """Accepted drafts per verified draft; None when none was verified."""


def calibrated(rounds: Sequence[RoundRow], temperatures: Sequence[float]) -> Sequence[RoundRow]:
    """The rounds with the confidences that a threshold sees: scaled by a calibration, if there is one."""
    if not temperatures:
        return rounds
    scaled = scale(torch.tensor([row.confidences for row in rounds]), temperatures).tolist()
    return [replace(row, confidences=tuple(line)) for row, line in zip(rounds, scaled, strict=True)]


def sweep_thresholds(rounds: Sequence[RoundRow], thresholds: Sequence[float] = THRESHOLDS) -> list[SweepPoint]:
    """One point per temperature and threshold, of one drafter's rounds; empty without confidences."""
    points = []
    for temperature in dict.fromkeys(row.temperature for row in rounds):
        rows = [row for row in rounds if row.temperature == temperature and row.confidences]
        if rows:
            points += [_point(rows, temperature, threshold) for threshold in thresholds]
    return points


def _point(rows: Sequence[RoundRow], temperature: float, threshold: float) -> SweepPoint:
    verified = accepted = emitted = 0
    for row in rows:
        allowed = next((k for k, c in enumerate(row.confidences) if c < threshold), len(row.confidences))
        if allowed >= row.proposed:  # nothing is held back: as recorded, also where a stop token ended the round
            outcome = (row.proposed, row.accepted, row.emitted)
        else:
            kept = min(row.accepted, allowed)
            outcome = (allowed, kept, kept + 1)
        verified, accepted, emitted = (
            total + value for total, value in zip((verified, accepted, emitted), outcome, strict=True)
        )
    return SweepPoint(
        temperature=temperature,
        threshold=threshold,
        verified=verified / len(rows),
        accepted_length=emitted / len(rows),
        verify_rate=accepted / verified if verified else None,
    )
