"""An evaluation's report as data, as terminal tables and as Markdown: one set of tables for both. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.acceptance import (
    ALL_DOMAINS,
    AcceptanceSummary,
    Breakdown,
    Estimate,
    GreedyCheck,
    PositionRate,
    SpeedSummary,
)
from pipeline.sweep import SweepPoint

TAU_TOLERANCE = 0.25
"""Relative difference between training's expected accepted length and the measured τ above which we warn."""

_TRAINED, _UNTRAINED = "trained", "untrained"
_NOTE_TAU = (
    "τ: tokens per round, the bonus token included. In brackets: 95 % bootstrap interval over prompts. "
    "A round that a stop token ends has no bonus token; one that passes max_new_tokens counts in full."
)
_NOTE_POSITION = (
    "conditional: accepted given that every earlier draft of the round was, over so many rounds; survival: share of "
    "all rounds that accepted at least this many drafts; their sum is the accepted drafts per round."
)
_NOTE_CONTEXT = "Tokens before the round's first draft, prompt included."
_NOTE_SWEEP = (
    "verified: drafts per round that reach the target when a round stops before its first draft with a confidence "
    "below the threshold. Computed from the recorded rounds, each replayed with fewer drafts; where the rounds behind "
    "it would have started is not replayed."
)
_NOTE_SPEED = (
    "rate: verified drafts that were accepted. Speed-up η = T_target · τ / (T_draft + T_verify): milliseconds per "
    "token of the target alone, per draft and per verification; a batch's times are shared by the requests in it."
)


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


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text: what the terminal and the Markdown file both show."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def report_tables(report: EvaluationReport) -> list[TextTable]:
    """Accepted length per domain, acceptance by position, untrained vs trained, then the further groupings."""
    tables = [_domain_table(report), _position_table(report), _comparison_table(report)]
    tables += [_breakdown_table(report, kind) for kind in dict.fromkeys(b.kind for b in report.breakdowns)]
    return [*tables, _sweep_table(report)] if report.sweep else tables


def _domain_table(report: EvaluationReport) -> TextTable:
    temperatures, drafters = _groups(report)
    domains = [domain for domain in dict.fromkeys(s.domain for s in report.acceptance) if domain != ALL_DOMAINS]
    rows = []
    for domain in [*sorted(domains), ALL_DOMAINS]:
        for temperature in temperatures:
            found = [report.summary(drafter, temperature, domain) for drafter in drafters]
            prompts = max((s.prompts for s in found if s), default=0)
            rounds = f"{found[0].rounds:,}" if found[0] else "-"
            cells = [_estimate(s.accepted_length if s else None) for s in found]
            rows.append((domain, f"{temperature:g}", str(prompts), rounds, *cells))
    columns = ("domain", "T", "prompts", "rounds", *(f"τ {drafter}" for drafter in drafters))
    return TextTable("Accepted length per domain", columns, tuple(rows), _NOTE_TAU)


def _position_table(report: EvaluationReport) -> TextTable:
    temperatures, drafters = _groups(report)
    rows = []
    for temperature in temperatures:
        for k in range(report.block_size):
            rate, *others = [_rate(report.summary(drafter, temperature), k) for drafter in drafters]
            if rate is None:
                continue
            cells = [f"{other.conditional.value:.2f}" if other and other.conditional else "-" for other in others]
            survival = f"{rate.unconditional.value:.2f}"
            rows.append(
                (f"{temperature:g}", str(k + 1), _estimate(rate.conditional), str(rate.reached), survival, *cells)
            )
    columns = ("T", "position", "conditional", "rounds", "survival", *(f"{d}: conditional" for d in drafters[1:]))
    title = f"Acceptance by position, {drafters[0]} drafter, all domains"
    return TextTable(title, columns, tuple(rows), _NOTE_POSITION)


def _comparison_table(report: EvaluationReport) -> TextTable:
    temperatures, drafters = _groups(report)
    columns = ("drafter", "T", "τ", "rate", "target ms", "draft ms", "verify ms", "η")
    rows = []
    for temperature in temperatures:
        for drafter in reversed(drafters):
            summary = report.summary(drafter, temperature)
            if summary is None:
                continue
            rows.append(
                (
                    drafter,
                    f"{temperature:g}",
                    _estimate(summary.accepted_length),
                    _percent(summary.verify_rate),
                    *_speed_cells(report, drafter, temperature),
                )
            )
    title = "Untrained vs trained" if _UNTRAINED in drafters else "The drafter and its speed"
    return TextTable(title, columns, tuple(rows), _NOTE_SPEED)


def _breakdown_table(report: EvaluationReport, kind: str) -> TextTable:
    temperatures, drafters = _groups(report)
    found = {
        (b.label, b.summary.temperature, b.summary.drafter): b.summary for b in report.breakdowns if b.kind == kind
    }
    rows = []
    for label in dict.fromkeys(label for label, _, _ in found):
        for temperature in temperatures:
            summaries = [found.get((label, temperature, drafter)) for drafter in drafters]
            if not any(summaries):
                continue
            rounds = f"{summaries[0].rounds:,}" if summaries[0] else "-"
            cells = [_estimate(s.accepted_length if s else None) for s in summaries]
            rows.append((label, f"{temperature:g}", rounds, *cells))
    columns = (kind, "T", "rounds", *(f"τ {drafter}" for drafter in drafters))
    note = _NOTE_CONTEXT if kind == "context length" else _NOTE_TAU
    return TextTable(f"Accepted length by {kind}", columns, tuple(rows), note)


def _sweep_table(report: EvaluationReport) -> TextTable:
    rows = [
        (
            f"{p.temperature:g}",
            f"{p.threshold:g}",
            f"{p.verified:.2f}",
            f"{p.accepted_length:.2f}",
            "-" if p.verify_rate is None else f"{100 * p.verify_rate:.0f} %",
        )
        for p in report.sweep
    ]
    columns = ("T", "threshold", "verified", "τ", "verify rate")
    return TextTable("Confidence threshold, trained drafter", columns, tuple(rows), _NOTE_SWEEP)


def _speed_cells(report: EvaluationReport, drafter: str, temperature: float) -> tuple[str, ...]:
    found = next((s for s in report.speed if (s.drafter, s.temperature) == (drafter, temperature)), None)
    if found is None:
        return ("-",) * 4
    times = (found.target_seconds_per_token, found.draft_seconds_per_round, found.verify_seconds_per_round)
    return (*(f"{1000 * seconds:.1f}" for seconds in times), f"{found.speedup:.2f}")


def _groups(report: EvaluationReport) -> tuple[list[float], list[str]]:
    """(temperatures ascending, drafters with the trained one first)."""
    temperatures = sorted({s.temperature for s in report.acceptance})
    return temperatures, sorted({s.drafter for s in report.acceptance}, key=lambda d: (d != _TRAINED, d))


def _rate(summary: AcceptanceSummary | None, index: int) -> PositionRate | None:
    return summary.positions[index] if summary else None


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _percent(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{100 * estimate.value:.0f} %"


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


def print_report(report: EvaluationReport, console: Console) -> None:
    """The tables and verdicts on a terminal."""
    for text in report_tables(report):
        table = Table(title=text.title, title_style="bold", title_justify="left", caption=text.note)
        table.caption_justify = "left"
        for number, column in enumerate(text.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in text.rows:
            table.add_row(*row, style="bold" if row[0] in (ALL_DOMAINS, _TRAINED) else None)
        console.print(table)
        console.print()
    for line in verdict_lines(report):
        alarming = line.startswith("warning") or "NOT EQUAL" in line or "DISAGREE" in line
        console.print(line, style="bold red" if alarming else None, highlight=False, markup=False)


def markdown(report: EvaluationReport) -> str:
    """The whole report as one Markdown file that needs nothing beside it."""
    parts = [f"# Evaluation of {report.name}", "", f"Drafter `{report.drafter}`, target `{report.target}`.", ""]
    for table in report_tables(report):
        parts += [f"## {table.title}", "", *_markdown_table(table.columns, table.rows), "", table.note, ""]
    parts += ["## Checks", "", *(f"- {line}" for line in verdict_lines(report)), ""]
    settings = [(name, json.dumps(value, ensure_ascii=False)) for name, value in report.settings.items()]
    parts += ["## Settings", "", *_markdown_table(("setting", "value"), settings)]
    return "\n".join(parts) + "\n"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
