"""Pictures of an evaluation. Every function returns a matplotlib Figure and writes nothing.

matplotlib is imported when the first picture is drawn; figures belong to nobody's global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from model.decoding.calibration import Calibration, Quality
from pipeline.acceptance import ALL_DOMAINS, AcceptanceSummary, Estimate
from pipeline.report import EvaluationReport
from pipeline.report_tables import drafters_of, temperatures_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
"""Colours that stay apart for colour-blind readers."""
_GREY = "#8a8a8a"
_WIDTH = 8.4


def plot_domains(report: EvaluationReport) -> Figure:
    """Accepted length per domain: one bar per temperature, whiskers are 95 % intervals; untrained as a grey mark."""
    drafters, temperatures = drafters_of(report), temperatures_of(report)
    domains = [*sorted({s.domain for s in report.acceptance} - {ALL_DOMAINS}), ALL_DOMAINS]
    figure, (axes,) = _figure(1, 0.9 + 0.34 * len(domains) * len(temperatures))
    height = 0.8 / len(temperatures)
    for t, temperature in enumerate(temperatures):
        for row, domain in enumerate(domains):
            y = row + (t - (len(temperatures) - 1) / 2) * height
            label = f"temperature {temperature:g}" if row == 0 else None
            found = report.summary(drafters[0], temperature, domain)
            if found is not None:
                _bar(axes, y, found.accepted_length, height, (COLORS[t % len(COLORS)], label))
            for other in drafters[1:]:
                beside = report.summary(other, temperature, domain)
                if beside is not None:
                    mark = f"{other} drafter" if row == t == 0 else None
                    axes.plot([beside.accepted_length.value], [y], "|", color="#222222", ms=11, mew=2, label=mark)
    axes.set_yticks(range(len(domains)), domains)
    axes.invert_yaxis()
    axes.axvline(1.0, color=_GREY, linewidth=0.8)
    axes.set_xlabel("τ: tokens per round, bonus included (1 = the target alone)")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, min(report.block_size + 1, 1.25 * axes.get_xlim()[1]))
    _legend(figure, axes)
    return figure


def plot_positions(report: EvaluationReport) -> Figure:
    """Acceptance by draft position: conditional with 95 % intervals, and prefix survival."""
    temperatures = temperatures_of(report)
    figure, panels = _figure(len(temperatures), 2.9, columns=True)
    for axes, temperature in zip(panels, temperatures, strict=True):
        for index, drafter in enumerate(drafters_of(report)):
            summary = report.summary(drafter, temperature)
            if summary is not None:
                _positions(axes, summary, COLORS[index % len(COLORS)] if index == 0 else _GREY)
        axes.set_title(f"temperature {temperature:g}", loc="left")
        axes.set_ylim(0, 1.02)
        axes.set_xticks(range(1, report.block_size + 1))
        axes.set_xlabel("draft position")
    panels[0].set_ylabel("rate")
    _legend(figure, panels[0])
    return figure


def plot_sweep(report: EvaluationReport) -> Figure:
    """What a confidence threshold trades: accepted length against drafts verified per round."""
    figure, (axes,) = _figure(1, 3.4)
    for index, temperature in enumerate(dict.fromkeys(point.temperature for point in report.sweep)):
        points = [point for point in report.sweep if point.temperature == temperature]
        color = COLORS[index % len(COLORS)]
        x, y = [point.verified for point in points], [point.accepted_length for point in points]
        axes.plot(x, y, "o-", color=color, ms=4, label=f"temperature {temperature:g}")
        labelled = float("inf")
        for point in points:
            if point.threshold in _LABELLED and labelled - point.verified > 0.03 * report.block_size:
                labelled = point.verified
                place = (point.verified, point.accepted_length)
                axes.annotate(
                    f"{point.threshold:g}", place, (3, -11), textcoords="offset points", fontsize=8, color=color
                )
    axes.set_xlabel("drafts verified per round (labels: threshold)")
    axes.set_ylabel("τ")
    axes.set_ylim(bottom=1.0 - 0.05 * (axes.get_ylim()[1] - 1.0))
    _legend(figure, axes)
    return figure


_LABELLED = (0.1, 0.3, 0.5, 0.7, 0.9)


def plot_speed(report: EvaluationReport) -> Figure:
    """Milliseconds per committed token: the target alone, and drafting plus verifying over τ."""
    figure, (axes,) = _figure(1, 0.9 + 0.3 * (len(report.speed) + len({s.temperature for s in report.speed})))
    labels: list[str] = []
    for temperature in sorted({s.temperature for s in report.speed}):
        group = [s for s in report.speed if s.temperature == temperature]
        target = 1000 * group[0].target_seconds_per_token
        axes.barh(len(labels), target, color=_GREY, label=None if labels else "target alone")
        axes.text(target, len(labels), f" {target:.1f}", va="center", fontsize=8)
        labels.append(f"target alone, T {temperature:g}")
        for speed in group:
            draft = 1000 * speed.draft_seconds_per_round / speed.accepted_length
            verify = 1000 * speed.verify_seconds_per_round / speed.accepted_length
            first = len(labels) == 1
            axes.barh(len(labels), draft, color=COLORS[1], label="drafting" if first else None)
            axes.barh(len(labels), verify, left=draft, color=COLORS[0], label="verifying" if first else None)
            axes.text(
                draft + verify, len(labels), f" {draft + verify:.1f}  (η {speed.speedup:.2f})", va="center", fontsize=8
            )
            labels.append(f"{speed.drafter}, T {temperature:g}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(right=1.22 * axes.get_xlim()[1])
    axes.set_xlabel("milliseconds per token of one request")
    _legend(figure, axes)
    return figure


def plot_reliability(calibration: Calibration) -> Figure:
    """Predicted against observed survival of the prefix, before and after scaling, a panel per position."""
    count = len(calibration.temperatures)
    columns = min(4, count)
    rows = -(-count // columns)
    figure, panels = _figure(rows * columns, 2.3 * rows + 0.3, columns=columns)
    for index, axes in enumerate(panels):
        if index >= count:
            axes.set_axis_off()
            continue
        axes.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8)
        pairs = (
            (calibration.before[index].prefix, "before", COLORS[1], "x"),
            (calibration.after[index].prefix, "after", COLORS[0], "o"),
        )
        for quality, label, color, marker in pairs:
            if quality is not None:
                _reliability(axes, quality, (f"{label}: ECE {quality.ece:.3f}", color, marker))
        axes.set_title(f"position {index + 1}, T = {calibration.temperatures[index]:.2f}", loc="left", fontsize=9)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xticks((0, 0.5, 1))
        axes.set_yticks((0, 0.5, 1))
        axes.legend(fontsize=7, frameon=False, loc="upper left", handlelength=1.2)
    figure.supxlabel("predicted survival of the prefix", fontsize=9)
    figure.supylabel("observed", fontsize=9)
    return figure


def _reliability(axes: Axes, quality: Quality, style: tuple[str, str, str]) -> None:
    label, color, marker = style
    bins = [found for found in quality.bins if found.count]
    largest = max(found.count for found in bins)
    sizes = [8 + 40 * found.count / largest for found in bins]
    axes.plot([b.predicted for b in bins], [b.observed for b in bins], color=color, linewidth=0.9, alpha=0.6)
    axes.scatter(
        [b.predicted for b in bins], [b.observed for b in bins], s=sizes, color=color, marker=marker, label=label
    )


def _bar(axes: Axes, y: float, estimate: Estimate, height: float, style: tuple[str, str | None]) -> None:
    color, label = style
    axes.barh(y, estimate.value, height=0.9 * height, color=color, label=label)
    end = estimate.value
    if estimate.low is not None and estimate.high is not None:
        axes.plot([estimate.low, estimate.high], [y, y], color="#222222", linewidth=1)
        end = estimate.high
    axes.text(end, y, f"  {estimate.value:.2f}", va="center", fontsize=8)


def _positions(axes: Axes, summary: AcceptanceSummary, color: str) -> None:
    reached = [rate for rate in summary.positions if rate.conditional is not None]
    x = [rate.position for rate in reached]
    y = [rate.conditional.value for rate in reached if rate.conditional]
    axes.plot(x, y, "o-", color=color, ms=4, label=f"{summary.drafter}: conditional")
    bounds = [
        (rate.position, rate.conditional.low, rate.conditional.high)
        for rate in reached
        if rate.conditional and rate.conditional.low is not None and rate.conditional.high is not None
    ]
    if bounds:
        axes.fill_between(
            [b[0] for b in bounds], [b[1] for b in bounds], [b[2] for b in bounds], color=color, alpha=0.15
        )
    survival = [rate.unconditional.value for rate in summary.positions]
    axes.plot(
        [rate.position for rate in summary.positions], survival, "s--", color=color, ms=3, linewidth=1,
        label=f"{summary.drafter}: survival",
    )  # fmt: skip


def _figure(panels: int, height: float, *, columns: bool | int = False) -> tuple[Figure, Sequence[Axes]]:
    """A figure of one column of panels, or of `columns` (True: all side by side)."""
    from matplotlib.figure import Figure

    across = panels if columns is True else (columns or 1)
    down = -(-panels // across)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = [figure.add_subplot(down, across, index + 1) for index in range(panels)]
    for each in axes:
        each.grid(visible=True, color="#dddddd", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
        each.tick_params(labelsize=9)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
