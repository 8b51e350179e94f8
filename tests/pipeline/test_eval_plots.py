"""Pictures show the numbers they were given."""

from __future__ import annotations

import pytest

from pipeline.eval_plots import plot_domains, plot_positions, plot_reliability, plot_speed, plot_sweep
from tests.pipeline.test_report import make_report
from tests.pipeline.test_report_tables import make_calibration


def test_domains_have_a_bar_per_temperature_and_measured_value() -> None:
    [axes] = plot_domains(make_report()).axes
    widths = sorted(float(bar.get_width()) for bar in axes.patches)
    assert widths == pytest.approx([1.0, 2.0, 2.0, 2.6, 3.0])  # chat, math and all at 1, all at 0, math at 0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["chat", "math", "all"]


def test_positions_show_conditional_and_survival() -> None:
    first, second = plot_positions(make_report()).axes
    lines = {line.get_label(): line.get_ydata().tolist() for line in first.lines}
    assert lines["trained: conditional"] == pytest.approx([0.8, 1.0, 0.0])
    assert lines["trained: survival"] == pytest.approx([0.8, 0.8, 0.0])
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("temperature 0", "temperature 1")


def test_sweep_and_speed() -> None:
    [axes] = plot_sweep(make_report()).axes
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([3.0, 2.0])
    [axes] = plot_speed(make_report()).axes
    assert sorted(float(bar.get_width()) for bar in axes.patches) == pytest.approx([5 / 2.6, 25 / 2.6, 20.0])


def test_reliability_has_a_panel_per_position() -> None:
    figure = plot_reliability(make_calibration())
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["position 1, T = 1.50", "position 2, T = 1.00"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["before: ECE 0.125", "after: ECE 0.001"]
