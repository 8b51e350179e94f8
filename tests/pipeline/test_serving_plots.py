"""What the pictures show, read back from the figures; how they look was looked at by eye."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from model.decoding.simulate import Point
from pipeline.serving import SimulationResult
from pipeline.serving_plots import STYLES, plot_budget, plot_cost_table, plot_frontier, png_bytes, save_png
from tests.pipeline.test_serving import TABLE


def point(policy: str, users: int, speed: float, budget: float) -> Point:
    return Point(
        policy=policy,
        concurrency=users,
        tokens_per_second=speed,
        tokens_per_second_per_user=speed / users,
        accepted_length=1 + budget / 2,
        budget=budget,
        step_tokens=users * (1 + budget),
        drafted_steps=float(budget > 0),
        queue_seconds=0.0,
        seconds=1.0,
    )


@pytest.fixture
def result() -> SimulationResult:
    points = [point("none", 4, 30.0, 0.0), point("none", 1, 10.0, 0.0), point("dspark", 1, 25.0, 6.0)]
    return SimulationResult(
        name="n",
        table=TABLE,
        source="a formula",
        block_size=7,
        points=(*points, point("dspark", 4, 60.0, 4.0)),
        settings={},
        warnings=(),
    )


def lines_of(axes: object) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axes.get_lines()  # type: ignore[attr-defined]
    }


def test_the_frontier_has_one_line_per_policy_in_the_order_of_loads(result: SimulationResult) -> None:
    figure = plot_frontier(result)
    [axes] = figure.axes
    assert lines_of(axes) == {"no speculation": [(10, 10), (7.5, 30)], "DSpark": [(25, 25), (15, 60)]}
    assert axes.get_xlabel() == "tokens per second per user"
    assert axes.get_ylabel() == "tokens per second, all users"


def test_the_budget_picture_shows_multiples_of_plain_decoding_and_drafts(result: SimulationResult) -> None:
    above, below = plot_budget(result).axes
    assert lines_of(above)["DSpark"] == [(1, 2.5), (4, 2.0)]
    assert lines_of(below)["DSpark"] == [(1, 6.0), (4, 4.0)]
    assert [text.get_text() for text in below.get_xticklabels()] == ["1", "4"]


def test_without_plain_decoding_throughput_is_shown_as_it_is(result: SimulationResult) -> None:
    points = tuple(p for p in result.points if p.policy == "dspark")
    other = SimulationResult(name="n", table=TABLE, source="s", block_size=7, points=points, settings={}, warnings=())
    above, _ = plot_budget(other).axes
    assert lines_of(above)["DSpark"] == [(1, 25.0), (4, 60.0)]
    assert above.get_ylabel() == "tokens per second, all users"


def test_the_cost_picture_draws_a_step_function_in_milliseconds() -> None:
    above, below = plot_cost_table(TABLE).axes
    [stairs] = above.patches
    values, edges, baseline = stairs.get_data()
    assert values.tolist() == pytest.approx([11 + tokens for tokens in range(32)])
    assert list(edges[:3]) == [0.5, 1.5, 2.5]
    assert baseline is None
    assert below.get_xlabel() == "tokens per forward pass, B"
    assert above.get_ylabel() == "milliseconds per step"


def test_every_policy_has_a_style_of_its_own() -> None:
    from model.decoding.policies import POLICIES

    assert list(STYLES) == list(POLICIES)
    assert len({(style.color, style.marker) for style in STYLES.values()}) == len(STYLES)


def test_pictures_are_the_same_bytes_every_time(result: SimulationResult, tmp_path: Path) -> None:
    first = png_bytes(plot_frontier(result))
    assert first == png_bytes(plot_frontier(result))
    width, height = struct.unpack(">II", first[16:24])
    assert (width, height) == (924, 550)
    assert save_png(plot_frontier(result), tmp_path / "deep" / "f.png").read_bytes() == first


def test_matplotlib_is_imported_by_the_first_picture_only() -> None:
    code = "import sys, pipeline.serving_plots; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
