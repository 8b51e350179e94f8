"""The page holds everything it shows, escapes what it is given, and shows what exists."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline import serving
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.html_report import output_folder, read_report, write_html
from pipeline.report import DRAFTER_WEIGHTS
from pipeline.report_tables import calibration_table, report_tables
from tests.pipeline.test_report import make_report
from tests.pipeline.test_report_tables import make_calibration
from tests.pipeline.test_serving import simulation

__all__ = ["simulation"]


class Page(HTMLParser):
    """Titles, cells, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.cells: list[str] = []
        self.sources: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self._open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "h2":
            self.titles.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self.cells.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text(make_report(name="a<b>&c").to_json())
    return tmp_path


def page(config: Config, folder: Path) -> Page:
    written = write_html(config, folder)
    assert written == folder / "report.html"
    return Page(written.read_text())


def test_a_page_needs_nothing_beside_it(make_config: Callable[..., Config], folder: Path) -> None:
    found = page(make_config(), folder)
    assert found.sources
    assert all(source.startswith("data:image/png;base64,") for source in found.sources)
    text = (folder / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "a&lt;b&gt;&amp;c" in text
    assert "a<b>" not in text
    for name in ("domains", "positions", "sweep", "speed"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_cell_of_every_table_is_on_the_page(make_config: Callable[..., Config], folder: Path) -> None:
    (folder / "calibration.json").write_text(make_calibration().to_json())
    found = page(make_config(), folder)
    for table in [*report_tables(make_report()), calibration_table(make_calibration())]:
        for line in (table.columns, *table.rows):
            assert set(line) <= set(found.cells)


def test_sections_appear_with_their_artefacts(make_config: Callable[..., Config], folder: Path) -> None:
    config = make_config()
    first = page(config, folder).titles
    assert "Accepted length" in first
    assert not {"Calibration", "Cost of a step", "Serving, simulated"} & set(first)
    simulated = serving.output_folder(config)
    simulated.mkdir(parents=True)
    for name in (serving.FRONTIER, serving.BUDGET, serving.COSTS):
        (simulated / name).write_bytes((folder / "domains.png").read_bytes())
    (folder / "calibration.json").write_text(make_calibration().to_json())
    assert set(page(config, folder).titles) - set(first) == {"Calibration", "Cost of a step", "Serving, simulated"}


def test_a_calibration_of_another_drafter_is_not_shown(make_config: Callable[..., Config], tmp_path: Path) -> None:
    calibration = dataclasses.replace(make_calibration(), fitted_on={DRAFTER_WEIGHTS: "old"})
    (tmp_path / "calibration.json").write_text(calibration.to_json())
    for weights, shown in (("old", True), ("new", False)):
        (tmp_path / "report.json").write_text(make_report(settings={DRAFTER_WEIGHTS: weights}).to_json())
        assert ("Calibration" in page(make_config(), tmp_path).titles) is shown


def test_a_simulation_draws_itself_into_the_page(simulation: Callable[..., Config]) -> None:
    config = simulation()
    folder = output_folder(config)
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(make_report().to_json())
    serving.run_simulation(config)
    titles = Page((folder / "report.html").read_text()).titles
    assert {"Cost of a step", "Serving, simulated"} <= set(titles)


def test_a_report_without_sweep_speed_or_greedy_has_a_page(make_config: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(make_report(sweep=(), speed=(), greedy=(), agreement=None).to_json())
    (tmp_path / "speed.png").write_bytes(b"an earlier evaluation's")
    assert "Confidence threshold" not in page(make_config(), tmp_path).titles
    assert not (tmp_path / "speed.png").exists()


def test_no_report_is_no_page_and_another_versions_is_an_error(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    assert write_html(make_config(), tmp_path) is None
    (tmp_path / "report.json").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match=r"report\.json: not a report of this version \(KeyError"):
        read_report(tmp_path / "report.json")
