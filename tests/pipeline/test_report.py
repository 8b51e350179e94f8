"""The report as data: its verdicts, and its way through JSON."""

from __future__ import annotations

import json

import pytest

from pipeline.acceptance import GreedyCheck, SpeedSummary, break_down, summarise
from pipeline.plain_data import from_plain
from pipeline.report import EvaluationReport, TauAgreement, verdict_lines
from pipeline.sweep import sweep_thresholds
from tests.pipeline.test_acceptance import GAMMA, make_round


def make_report(**changes) -> EvaluationReport:
    rounds = [make_round(2, prompt=f"m{i}") for i in range(4)] + [
        make_round(0, prompt="c0", domain="chat", position=200, language="de")
    ]
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
        "sweep": tuple(sweep_thresholds([make_round(k, confidences=(0.9, 0.6, 0.1)) for k in (0, 1, 3)], (0.0, 0.5))),
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


def test_json_holds_the_report_and_the_derived_agreement() -> None:
    data = json.loads(make_report().to_json())
    assert data["agreement"]["agrees"] is True
    assert data["acceptance"][0]["accepted_length"]["value"] == pytest.approx(3.0)
    assert data["counts"] == {"evaluated": 5, "rejected": 0}


def test_json_gives_the_report_back() -> None:
    report = make_report()
    assert from_plain(EvaluationReport, json.loads(report.to_json())) == report
