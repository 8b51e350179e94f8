"""An evaluation's report on a terminal and as one Markdown file."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cache_store.commands import terminal
from pipeline.acceptance import ALL_DOMAINS, TRAINED
from pipeline.report import EvaluationReport, verdict_lines
from pipeline.report_tables import TextTable, report_tables

_MIN_CONSOLE_WIDTH = 110
_EMPHASISED = (ALL_DOMAINS, TRAINED)


def wide_console() -> Console:
    """The terminal; wide enough for the tables also where the width is unknown (a job's log)."""
    return terminal.wide_console(_MIN_CONSOLE_WIDTH)


def print_report(report: EvaluationReport, console: Console) -> None:
    """The tables and verdicts on a terminal."""
    for table in report_tables(report):
        print_table(table, console)
    for line in verdict_lines(report):
        alarming = line.startswith("warning") or "NOT EQUAL" in line or "DISAGREE" in line
        console.print(line, style="bold red" if alarming else None, highlight=False, markup=False)


def print_warnings(warnings: Sequence[str], console: Console) -> None:
    """One line each, as alarming as it is."""
    for warning in warnings:
        console.print(f"warning: {warning}", style="bold red", highlight=False, markup=False)


def print_table(text: TextTable, console: Console) -> None:
    """One table on a terminal."""
    table = Table(title=text.title, title_style="bold", title_justify="left", caption=text.note)
    table.caption_justify = "left"
    for number, column in enumerate(text.columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in text.rows:
        table.add_row(*map(escape, row), style="bold" if row[0] in _EMPHASISED else None)
    console.print(table)
    console.print()


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
