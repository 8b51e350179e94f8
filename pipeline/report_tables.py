"""The tables of an evaluation as text: what the terminal, the Markdown file and the page all show. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from model.decoding.calibration import LEAST_REACHED, Calibration, PositionQuality, Quality
from pipeline.acceptance import ALL_DOMAINS, TRAINED, UNTRAINED, AcceptanceSummary, Estimate, PositionRate
from pipeline.report import EvaluationReport

_NOTE_TAU = (
    "τ: tokens per round, the bonus token included. In brackets: 95 % bootstrap interval over prompts. "
    "A round that a stop token ends has no bonus token; one that passes max_new_tokens counts in full. "
    "evaluation.baseline_prompts_per_domain says how many prompts the untrained drafter decoded."
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
    "token of the target alone, per draft and per verification, all of them (and this τ) of the answers that the "
    "target decoded alone as well, in batches of the same size, whose times the requests share."
)
_NOTE_CALIBRATION = (
    "a_k: product of the confidences up to k, against the survival of the prefix; c_k: one confidence, against "
    "acceptance given that the drafts before it were accepted, over so many rounds that reached it. Before → after, on "
    f"rounds kept out of the fit. A position that fewer than {LEAST_REACHED} rounds of the fit reached has the "
    "temperature of the one before."
)


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
    temperatures, drafters = temperatures_of(report), drafters_of(report)
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
    temperatures, drafters = temperatures_of(report), drafters_of(report)
    rows = []
    for temperature in temperatures:
        for k in range(report.block_size):
            rate, *others = [_rate(report.summary(drafter, temperature), k) for drafter in drafters]
            if rate is None:
                continue
            cells = [f"{other.conditional.value:.2f}" if other and other.conditional else "-" for other in others]
            survival = f"{rate.unconditional.value:.2f}"
            rows.append(
                (f"{temperature:g}", str(k + 1), _estimate(rate.conditional), f"{rate.reached:,}", survival, *cells)
            )
    columns = ("T", "position", "conditional", "rounds", "survival", *(f"{d}: conditional" for d in drafters[1:]))
    title = f"Acceptance by position, {drafters[0]} drafter, all domains"
    return TextTable(title, columns, tuple(rows), _NOTE_POSITION)


def _comparison_table(report: EvaluationReport) -> TextTable:
    temperatures, drafters = temperatures_of(report), drafters_of(report)
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
    title = "Untrained vs trained" if UNTRAINED in drafters else "The drafter and its speed"
    return TextTable(title, columns, tuple(rows), _NOTE_SPEED)


def _breakdown_table(report: EvaluationReport, kind: str) -> TextTable:
    temperatures, drafters = temperatures_of(report), drafters_of(report)
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


def temperatures_of(report: EvaluationReport) -> list[float]:
    """Sampling temperatures, ascending."""
    return sorted({s.temperature for s in report.acceptance})


def drafters_of(report: EvaluationReport) -> list[str]:
    """Drafters, the trained one first."""
    return sorted({s.drafter for s in report.acceptance}, key=lambda drafter: (drafter != TRAINED, drafter))


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


def calibration_table(calibration: Calibration) -> TextTable:
    """One row per draft position: temperature, and errors before and after."""
    rows = [
        (
            str(before.position),
            f"{temperature:.2f}",
            f"{before.conditional.count:,}" if before.conditional else "0",
            _change(before.prefix, after.prefix, "ece"),
            _change(before.prefix, after.prefix, "brier"),
            _change(before.conditional, after.conditional, "ece"),
            _auroc(before),
        )
        for temperature, before, after in zip(
            calibration.temperatures, calibration.before, calibration.after, strict=True
        )
    ]
    columns = ("position", "T_k", "reached", "ECE of a_k", "Brier of a_k", "ECE of c_k", "AUROC of c_k")
    return TextTable("Calibration", columns, tuple(rows), _NOTE_CALIBRATION)


def _change(before: Quality | None, after: Quality | None, field: str) -> str:
    if before is None or after is None:
        return "-"
    return f"{getattr(before, field):.3f} → {getattr(after, field):.3f}"


def _auroc(position: PositionQuality) -> str:
    found = position.conditional.auroc if position.conditional else None
    return "-" if found is None else f"{found:.2f}"
