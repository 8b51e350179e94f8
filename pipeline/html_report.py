"""An evaluation's page: one HTML file that needs nothing beside it, and its pictures as PNG files.

Calibration, cost table and simulated serving are shown when their artefacts exist; whoever makes one calls `write_html`
again. Pictures are embedded, nothing is loaded from anywhere, and there is no script.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.decoding.calibration import Calibration, from_json
from model.decoding.cost_table import load_cost_table
from pipeline.acceptance import ALL_DOMAINS, TRAINED
from pipeline.atomic_file import write_atomically
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.eval_plots import plot_domains, plot_positions, plot_reliability, plot_speed, plot_sweep
from pipeline.plain_data import from_plain
from pipeline.report import DRAFTER_WEIGHTS, EvaluationReport, verdict_lines
from pipeline.report_tables import TextTable, calibration_table, drafters_of, report_tables, temperatures_of
from pipeline.serving_plots import plot_cost_table, save_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_JSON, REPORT_HTML, CALIBRATION = "report.json", "report.html", "calibration.json"
_DRAWN = {"domains", "positions", "sweep", "speed", "calibration"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #5f6368; --line: #dadce0; --page: #fff; --card: #f6f7f9;
  --bad: #b3261e; --good: #1b6e3c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a0a4aa; --line: #3a3d42; --page: #16181b;
  --card: #1f2226; --bad: #ff8a80; --good: #7fd69b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .85em; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; margin: 0; }
p.source, p.note { color: var(--soft); margin: .4rem 0 0; font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }
.card { background: var(--card); border-radius: .6rem; padding: .8rem 1rem; }
.card b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .85rem; }
ul.checks { list-style: none; margin: 0; padding: 0; }
ul.checks li { padding: .35rem 0 .35rem 1.6rem; position: relative; overflow-wrap: anywhere; }
ul.checks li::before { content: "\\2713"; position: absolute; left: .2rem; color: var(--good); font-weight: 700; }
ul.checks li.bad { color: var(--bad); } ul.checks li.bad::before { content: "!"; color: var(--bad); }
ul.checks li.plain::before { content: "\\00b7"; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin-top: .6rem; }
th, td { padding: .28rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: .2rem; }
tr.strong td { font-weight: 650; }
table.settings td { white-space: normal; text-align: left; vertical-align: top; }
figure { margin: .8rem 0 0; background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .5rem;
  overflow-x: auto; }
figure img { display: block; width: 100%; min-width: 36rem; height: auto; }
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the page: its file, and what it shows in words."""

    file: Path
    caption: str


def output_folder(config: Config) -> Path:
    """Where an evaluation's files go."""
    return Path(config.evaluation.output or Path(config.training.output) / "evaluation")


def write_html(config: Config, folder: Path) -> Path | None:
    """(Re)make `<folder>/report.html` and its pictures from the artefacts at hand; None where no evaluation is.

    Raises ConfigError when report.json is another version's, CalibrationError and CostTableError for broken artefacts.
    """
    file = folder / REPORT_JSON
    if not file.is_file():
        return None
    report = read_report(file)
    calibration = saved_calibration(report, folder)
    pictures = draw_pictures(report, calibration, folder) | serving_pictures(config, folder)
    page = render(report, calibration, pictures)
    write_atomically(folder / REPORT_HTML, page)
    return folder / REPORT_HTML


def saved_calibration(report: EvaluationReport, folder: Path) -> Calibration | None:
    """The calibration beside a report; None where there is none, or one of another drafter's rounds.

    Raises CalibrationError for a broken file.
    """
    saved = folder / CALIBRATION
    if not saved.is_file():
        return None
    calibration = from_json(saved.read_text(encoding="utf-8"), source=str(saved))
    fitted, evaluated = calibration.fitted_on.get(DRAFTER_WEIGHTS), report.settings.get(DRAFTER_WEIGHTS)
    return None if fitted and evaluated and fitted != evaluated else calibration


def read_report(file: Path) -> EvaluationReport:
    """An evaluation's report.json. Raises ConfigError when it cannot be read as one."""
    try:
        return from_plain(EvaluationReport, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: not a report of this version ({type(error).__name__}: {error}); evaluate again"
        ) from error


def draw_pictures(report: EvaluationReport, calibration: Calibration | None, folder: Path) -> dict[str, Picture]:
    """Draw what the report holds into `folder`; keys are the page's sections."""
    figures: dict[str, tuple[Figure, str]] = {
        "domains": (plot_domains(report), "Accepted length per domain, with 95 % intervals"),
        "positions": (plot_positions(report), "Acceptance by draft position"),
    }
    if report.sweep:
        figures["sweep"] = (plot_sweep(report), "Accepted length against drafts verified, by confidence threshold")
    if report.speed:
        figures["speed"] = (plot_speed(report), "Milliseconds per token, the target alone and with drafts")
    if calibration is not None:
        figures["calibration"] = (plot_reliability(calibration), "Reliability before and after calibration")
    for name in _DRAWN - figures.keys():  # of an earlier evaluation in the same folder
        (folder / f"{name}.png").unlink(missing_ok=True)
    return {
        name: Picture(save_png(figure, folder / f"{name}.png"), caption) for name, (figure, caption) in figures.items()
    }


def serving_pictures(config: Config, folder: Path) -> dict[str, Picture]:
    """Cost table and simulated serving, where somebody made them."""
    from pipeline import serving  # it calls back here when a simulation is done

    pictures = {}
    simulated = serving.output_folder(config)
    for name, file, caption in (
        ("frontier", serving.FRONTIER, "Simulated throughput against speed per user, by policy"),
        ("budget", serving.BUDGET, "Simulated throughput and verification budget under load"),
        ("costs", serving.COSTS, "Steps of the target by tokens per forward"),
    ):
        if (simulated / file).is_file():
            pictures[name] = Picture(simulated / file, caption)
    table = serving.cost_table_path(config)
    if "costs" not in pictures and table.is_file():
        figure = plot_cost_table(load_cost_table(table))
        pictures["costs"] = Picture(
            save_png(figure, folder / serving.COSTS), "Steps of the target by tokens per forward"
        )
    return pictures


def render(report: EvaluationReport, calibration: Calibration | None, pictures: dict[str, Picture]) -> str:
    """The page as text."""
    tables = report_tables(report)
    sections = [
        ("Accepted length", ["domains"], tables[:1]),
        ("Acceptance by position", ["positions"], tables[1:2]),
        ("Speed", ["speed"], tables[2:3]),
        *(("", [], [table]) for table in tables[3 : len(tables) - bool(report.sweep)]),
        ("Confidence threshold", ["sweep"], tables[-1:] if report.sweep else []),
        ("Calibration", ["calibration"], [calibration_table(calibration)] if calibration else []),
        ("Cost of a step", ["costs"], []),
        ("Serving, simulated", ["frontier", "budget"], []),
    ]
    body = [
        f"<h1>Evaluation of {_text(report.name)}</h1>",
        f'<p class="source">drafter <code>{_text(report.drafter)}</code>, '
        f"target <code>{_text(report.target)}</code></p>",
        _cards(report),
        "<h2>Checks</h2>",
        _checks(report),
    ]
    for title, names, shown in sections:
        found = [pictures[name] for name in names if name in pictures]
        if found or shown:
            body.append(f"<h2>{_text(title or shown[0].title)}</h2>")
            body += [_figure(picture) for picture in found]
            body += [_table(table) for table in shown]
    body += ["<h2>Settings</h2>", _settings(report.settings)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Evaluation of {_text(report.name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _cards(report: EvaluationReport) -> str:
    cards = [
        f'<div class="card"><b>{_text(value)}</b><span>{_text(label)}</span></div>'
        for value, label in _headlines(report)
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _headlines(report: EvaluationReport) -> Iterator[tuple[str, str]]:
    drafter = drafters_of(report)[0]
    for temperature in temperatures_of(report):
        summary = report.summary(drafter, temperature, ALL_DOMAINS)
        if summary is not None:
            interval = summary.accepted_length
            bounds = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval.low and interval.high else ""
            yield f"{interval.value:.2f}", f"τ at temperature {temperature:g}{bounds}, {summary.rounds:,} rounds"
    for speed in report.speed:
        if speed.drafter == drafter:
            yield f"{speed.speedup:.2f}×", f"speed-up η at temperature {speed.temperature:g}"
    for check in report.greedy:
        if check.drafter == drafter:
            yield f"{check.equal}/{check.compared}", "greedy answers equal to the target's own"


def _checks(report: EvaluationReport) -> str:
    lines = []
    for line in verdict_lines(report):
        bad = line.startswith("warning") or "NOT EQUAL" in line or "DISAGREE" in line
        kind = ' class="bad"' if bad else ' class="plain"' if line.startswith("counts") else ""
        lines.append(f"<li{kind}>{_text(line)}</li>")
    return f'<ul class="checks">{"".join(lines)}</ul>'


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    rows = "".join(
        ('<tr class="strong">' if row[0] in (ALL_DOMAINS, TRAINED) else "<tr>")
        + "".join(f"<td>{_text(cell)}</td>" for cell in row)
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="note">{_text(table.note)}</p>'
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.file.read_bytes()).decode("ascii")
    return f'<figure><img alt="{_text(picture.caption)}" src="data:image/png;base64,{data}"></figure>'


def _settings(settings: dict[str, Any]) -> str:
    rows = []
    for name, value in settings.items():
        lines = value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None
        shown = (
            "".join(f"<pre>{_text(item)}</pre>" for item in lines)
            if lines
            else f"<code>{_text(json.dumps(value, ensure_ascii=False))}</code>"
        )
        rows.append(f"<tr><td>{_text(name)}</td><td>{shown}</td></tr>")
    return f'<div class="wide"><table class="settings"><tbody>{"".join(rows)}</tbody></table></div>'


def _text(value: str) -> str:
    return html.escape(value)
