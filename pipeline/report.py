"""An evaluation's report as data, and what it says about itself in single lines. Pure functions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.acceptance import ALL_DOMAINS, AcceptanceSummary, Breakdown, GreedyCheck, SpeedSummary
from pipeline.sweep import SweepPoint

DRAFTER_WEIGHTS = "drafter_weights"
"""Key of the digest of the measured drafter's weights, in an evaluation's settings and in a calibration."""
TAU_TOLERANCE = 0.25
"""Relative difference between training's expected accepted length and the measured τ above which we warn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TauAgreement:
    """Training's own expected accepted length beside the measured one."""

    expected: float
    measured: float
    temperature: float
    """Temperature of the measured value: training compares whole distributions, so it is the one nearest to 1."""
    tolerance: float = TAU_TOLERANCE

    @property
    def relative_difference(self) -> float:
        """(measured - expected) / expected."""
        return (self.measured - self.expected) / self.expected

    @property
    def agrees(self) -> bool:
        """Whether the two differ by at most the tolerance."""
        return abs(self.relative_difference) <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Everything that an evaluation says; `settings` echoes how it was run (JSON types)."""

    name: str
    drafter: str
    target: str
    block_size: int
    settings: dict[str, Any]
    acceptance: tuple[AcceptanceSummary, ...]
    breakdowns: tuple[Breakdown, ...]
    sweep: tuple[SweepPoint, ...]
    """What a confidence threshold would do, trained drafter."""
    speed: tuple[SpeedSummary, ...]
    greedy: tuple[GreedyCheck, ...]
    agreement: TauAgreement | None
    warnings: tuple[str, ...]
    counts: dict[str, int]
    """Prompts read, evaluated and rejected, turns not reached."""

    def summary(self, drafter: str, temperature: float, domain: str = ALL_DOMAINS) -> AcceptanceSummary | None:
        """One group's summary, or None when it was not measured."""
        wanted = (drafter, temperature, domain)
        return next((s for s in self.acceptance if (s.drafter, s.temperature, s.domain) == wanted), None)

    def to_json(self) -> str:
        """The report as JSON text; derived values of the agreement are written out."""
        data = asdict(self)
        if self.agreement is not None:
            data["agreement"] |= {
                "relative_difference": self.agreement.relative_difference,
                "agrees": self.agreement.agrees,
            }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def verdict_lines(report: EvaluationReport) -> list[str]:
    """One line per check: greedy equality, agreement with training, warnings, counts."""
    lines = []
    for check in report.greedy:
        state = "equal" if check.equal == check.compared else "NOT EQUAL"
        line = f"greedy output of the {check.drafter} drafter {state} to the target's own: "
        line += f"{check.equal} of {check.compared} answers, token for token"
        if check.differences:
            prompt, turn, index = check.differences[0]
            line += f"; first difference: prompt {prompt}, turn {turn}, token {index}"
            if report.settings.get("dtype") == "bfloat16":
                line += " (in bfloat16 a block and a single token round differently; evaluation.dtype=float32 is exact)"
        lines.append(line)
    if report.agreement is not None:
        agreement = report.agreement
        lines.append(
            f"training expected τ {agreement.expected:.2f}, measured {agreement.measured:.2f} at temperature "
            f"{agreement.temperature:g} ({100 * agreement.relative_difference:+.0f} %): "
            + ("they agree" if agreement.agrees else "THEY DISAGREE")
            + f" (tolerance {100 * agreement.tolerance:.0f} %)"
        )
    lines += [f"warning: {warning}" for warning in report.warnings]
    return [*lines, "counts: " + ", ".join(f"{name} {value}" for name, value in report.counts.items())]
