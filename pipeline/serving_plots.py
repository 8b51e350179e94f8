"""Pictures of costs and of simulated serving. Every function returns a matplotlib Figure and writes nothing.

matplotlib is imported when the first picture is drawn; figures belong to nobody's global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from model.decoding.cost_table import CostTable
from model.decoding.simulate import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipeline.serving import SimulationResult

DPI = 110
_COLOURS = 96
_MAGNIFIED_LEAST = 64
"""Tokens that the magnified part of a cost table shows at least; and the most dots that stay apart."""


class _Style(NamedTuple):
    label: str
    color: str
    marker: str
    line: str


STYLES = {
    "none": _Style("no speculation", "#7f7f7f", "o", ":"),
    "mtp1": _Style("MTP-1", "#56b4e9", "s", "--"),
    "static3": _Style("static 3", "#009e73", "^", "--"),
    "static5": _Style("static 5", "#b8a000", "v", "--"),
    "static7": _Style("static 7", "#cc79a7", "D", "--"),
    "threshold": _Style("confidence threshold", "#0072b2", "P", "-."),
    "dspark": _Style("DSpark", "#d55e00", "o", "-"),
    "dspark_async": _Style("DSpark, asynchronous", "#000000", "x", "-"),
}
"""Colours that stay apart for colour-blind readers; markers and dashes tell them apart in grey."""


def plot_frontier(result: SimulationResult) -> Figure:
    """Engine throughput against what each user sees: one line per policy, one marker per concurrency (Figure 7)."""
    figure, (axes,) = _figure(1, (8.4, 5.0))
    for policy, points in _by_policy(result.points).items():
        speeds = [point.tokens_per_second_per_user for point in points]
        _line(axes, policy, speeds, [point.tokens_per_second for point in points])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("tokens per second per user")
    axes.set_ylabel("tokens per second, all users")
    axes.set_title(f"Throughput and speed per user, {_users(result)}", loc="left")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    _source(figure, result)
    return figure


def plot_budget(result: SimulationResult) -> Figure:
    """Throughput, and drafts verified per request and round, against the number of concurrent requests (Figure 8).

    Throughput is shown in multiples of plain decoding's where that was simulated: loads differ a hundredfold.
    """
    figure, (above, below) = _figure(2, (8.4, 6.8))
    by_policy = _by_policy(result.points)
    plain = {point.concurrency: point.tokens_per_second for point in by_policy.get("none", [])}
    for policy, points in by_policy.items():
        users = [point.concurrency for point in points]
        _line(above, policy, users, [point.tokens_per_second / plain.get(point.concurrency, 1.0) for point in points])
        _line(below, policy, users, [point.budget for point in points])
    above.set_ylabel("tokens per second,\nmultiples of no speculation" if plain else "tokens per second, all users")
    above.set_title("Throughput under load", loc="left")
    below.set_ylabel("drafts verified\nper request and round")
    below.set_title("Verification budget under load", loc="left")
    below.set_xlabel("concurrent requests")
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_xticks(_concurrencies(result), [str(users) for users in _concurrencies(result)])
        axes.minorticks_off()
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
    _legend(figure, above)
    _source(figure, result)
    return figure


def plot_cost_table(table: CostTable) -> Figure:
    """Milliseconds of a step over the whole table, and its small steps magnified: a step function, cliffs and all."""
    figure, (above, below) = _figure(2, (8.4, 6.0))
    _stairs(above, table, table.max_tokens, "#d55e00")
    part = min(table.max_tokens, max(_MAGNIFIED_LEAST, table.max_tokens // 8))
    _stairs(below, table, part, "#0072b2")
    above.set_title(f"One forward pass of {table.target}", loc="left")
    above.set_ylim(bottom=0)
    below.set_title(f"The same up to {part} tokens", loc="left")
    below.set_xlabel("tokens per forward pass, B")
    for axes in (above, below):
        axes.set_ylabel("milliseconds per step")
    drafting = f"; one drafting pass {1e3 * table.draft_cost(1):.2f} ms" if table.draft_cost(1) else ""
    figure.supxlabel(
        f"{table.kind} on {table.device}, {table.context_tokens} tokens of context{drafting}",
        fontsize=8,
        color="#555555",
    )
    return figure


def png_bytes(figure: Figure) -> bytes:
    """The figure as a small PNG of few colours, without a date in it: the same data give the same bytes."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    image = Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def save_png(figure: Figure, path: Path) -> Path:
    """Write the figure; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png_bytes(figure))
    return path


def _figure(rows: int, size: tuple[float, float]) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for each in axes:
        each.grid(visible=True, color="#dddddd", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
    return figure, axes


def _line(axes: Axes, policy: str, x: Sequence[float], y: Sequence[float]) -> None:
    style = STYLES[policy]
    adaptive = policy.startswith("dspark")
    axes.plot(
        x,
        y,
        linestyle=style.line,
        marker=style.marker,
        color=style.color,
        label=style.label,
        linewidth=2.2 if policy == "dspark" else 1.3,
        markersize=6 if adaptive else 4.5,
        zorder=3 if adaptive else 2,
    )


def _stairs(axes: Axes, table: CostTable, tokens: int, color: str) -> None:
    """Each step spans the token counts that cost the same; dots mark the counts that were measured."""
    milliseconds = 1e3 * table.seconds_B[:tokens]
    axes.stairs(milliseconds, [0.5 + size for size in range(tokens + 1)], baseline=None, color=color, linewidth=1.6)
    measured = [size for size in table.tokens if size <= tokens]
    if len(measured) <= _MAGNIFIED_LEAST:
        axes.plot(measured, milliseconds[[size - 1 for size in measured]], ".", color=color, markersize=6)
    axes.set_xlim(0, tokens + 1)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)


def _source(figure: Figure, result: SimulationResult) -> None:
    table = result.table
    text = f"simulated; acceptance: {result.source}; costs: {table.kind}, {table.target} on {table.device}"
    figure.supxlabel(text, fontsize=8, color="#555555")


def _by_policy(points: Sequence[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.policy, []).append(point)
    return {policy: sorted(rows, key=lambda p: p.concurrency) for policy, rows in found.items()}


def _concurrencies(result: SimulationResult) -> list[int]:
    return sorted({point.concurrency for point in result.points})


def _users(result: SimulationResult) -> str:
    users: list[Any] = _concurrencies(result)
    return f"{users[0]} to {users[-1]} concurrent requests" if len(users) > 1 else f"{users[0]} concurrent requests"
