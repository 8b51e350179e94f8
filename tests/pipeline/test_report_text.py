"""The terminal and the Markdown file show the same tables."""

from __future__ import annotations

import io

from rich.console import Console

from pipeline.report_tables import report_tables
from pipeline.report_text import markdown, print_report
from tests.pipeline.test_report import make_report


def test_terminal_and_markdown_show_the_same_cells() -> None:
    report = make_report()
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=200))
    text = markdown(report)
    for table in report_tables(report):
        for row in table.rows:
            for value in row:
                assert value in stream.getvalue()
                assert value in text
    assert "a\\|b.jsonl" in text  # a pipe would break the table
