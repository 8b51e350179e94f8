"""The report shows the numbers it was given, in the terminal, in Markdown and in JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from pipeline.acceptance import GreedyCheck, SpeedSummary, break_down, summarise
from pipeline.report import (
    EvaluationReport,
    TauAgreement,
    markdown,
    print_report,
    report_tables,
    verdict_lines,
)
from tests.pipeline.test_acceptance import GAMMA, make_round


def make_report(**changes) -> EvaluationReport:
    rounds = [make_round(2, prompt=f"m{i}") for i in range(4)] + [make_round(0, prompt="c0", domain="chat")]
    rounds += [make_round(0, drafter="untrained", prompt=f"m{i}") for i in range(4)]
    rounds += [make_round(1, temperature=1.0, prompt=f"m{i}") for i in range(4)]
    fields = {
        "name": "toy",
        "drafter": "run/drafter",
        "target": "build/target",
        "block_size": GAMMA,
        "settings": {"max_new_tokens": 8, "prompts": ["a|b.jsonl"]},
        "acceptance": tuple(summarise(rounds, block_size=GAMMA, seed=0)),
        "breakdowns": tuple(break_down(rounds, block_size=GAMMA, seed=0)),
        "sweep": (),
        "speed": (
            SpeedSummary(
                drafter="trained",
                temperature=0.0,
                target_seconds_per_token=0.02,
                draft_seconds_per_round=0.005,
                verify_seconds_per_round=0.025,
                accepted_length=2.6,
                speedup=1.7333,
                target_tokens=12,
            ),
        ),
        "greedy": (GreedyCheck(drafter="trained", compared=5, equal=5, differences=()),),
        "agreement": TauAgreement(expected=2.5, measured=2.6, temperature=0.0),
        "warnings": (),
        "counts": {"evaluated": 5, "rejected": 0},
    }
    return EvaluationReport(**{**fields, **changes})


def cell(report: EvaluationReport, table: int, keys: tuple[str, str], column: str) -> str:
    """The cell of the row whose first two cells are `keys`."""
    found = report_tables(report)[table]
    [line] = [line for line in found.rows if line[:2] == keys]
    return line[found.columns.index(column)]


def test_domain_table_has_every_domain_then_all() -> None:
    report = make_report()
    assert [row[0] for row in report_tables(report)[0].rows[::2]] == ["chat", "math", "all"]
    assert cell(report, 0, ("math", "0"), "τ trained").startswith("3.00")
    assert cell(report, 0, ("chat", "0"), "τ trained") == "1.00"  # one prompt: no interval
    assert cell(report, 0, ("all", "0"), "τ trained").startswith("2.60 [")
    assert cell(report, 0, ("all", "0"), "τ untrained").startswith("1.00 [")
    assert cell(report, 0, ("all", "1"), "rounds") == "4"
    assert cell(report, 0, ("chat", "1"), "τ trained") == "-"  # not measured is not zero


def test_position_table_keeps_conditional_and_survival_apart() -> None:
    report = make_report()
    # Every round that reached position 2 accepted it, but one of five did not reach it.
    assert cell(report, 1, ("0", "2"), "conditional").startswith("1.00")
    assert cell(report, 1, ("0", "2"), "survival") == "0.80"
    assert cell(report, 1, ("0", "2"), "rounds") == "4"
    assert cell(report, 1, ("0", "1"), "untrained: conditional") == "0.00"
    assert cell(report, 1, ("1", "3"), "conditional") == "-"


def test_comparison_shows_times_in_milliseconds_and_the_speed_up() -> None:
    report = make_report()
    rows = {(row[0], row[1]): row for row in report_tables(report)[2].rows}
    assert rows["trained", "0"][-4:] == ("20.0", "5.0", "25.0", "1.73")
    assert rows["untrained", "0"][-4:] == ("-",) * 4
    assert next(iter(rows)) == ("untrained", "0")


def test_verdicts_are_loud_when_something_is_wrong() -> None:
    broken = GreedyCheck(drafter="trained", compared=5, equal=4, differences=(("m1", 0, 7),))
    lines = verdict_lines(
        make_report(
            greedy=(broken,),
            agreement=TauAgreement(expected=5.0, measured=1.2, temperature=1.0),
            warnings=("the template differs",),
        )
    )
    assert "NOT EQUAL" in lines[0]
    assert "4 of 5" in lines[0]
    assert "prompt m1, turn 0, token 7" in lines[0]
    assert "THEY DISAGREE" in lines[1]
    assert "-76 %" in lines[1]
    assert lines[2] == "warning: the template differs"
    assert not any("NOT EQUAL" in line or "DISAGREE" in line for line in verdict_lines(make_report()))


@pytest.mark.parametrize(("measured", "agrees"), [(1.26, True), (0.76, True), (1.24, True), (0.7, False), (1.3, False)])
def test_agreement_is_relative(measured: float, agrees: bool) -> None:
    assert TauAgreement(expected=1.0, measured=measured, temperature=1.0, tolerance=0.26).agrees is agrees


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


def test_json_holds_the_report_and_the_derived_agreement() -> None:
    data = json.loads(make_report().to_json())
    assert data["agreement"]["agrees"] is True
    assert data["acceptance"][0]["accepted_length"]["value"] == pytest.approx(3.0)
    assert data["counts"] == {"evaluated": 5, "rejected": 0}
