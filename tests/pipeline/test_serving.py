"""The simulation job: inputs, files, refusals; and the committed example table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.simulate_serving import main
from model.decoding.calibration import Calibration
from model.decoding.cost_table import CostTable, Roofline, load_cost_table, roofline_table, save_cost_table
from model.decoding.policies import POLICIES
from pipeline.config import Config, dump_config
from pipeline.errors import ConfigError
from pipeline.serving import busy_warnings, cost_table_path, load_simulation, prepare, run_simulation
from tests.pipeline.test_recorded_rounds import row

ROOT = Path(__file__).resolve().parents[2]
TABLE = CostTable(
    device="here",
    target="t",
    kind="measured",
    context_tokens=8,
    tokens=tuple(range(1, 33)),
    steps_per_second=tuple(1 / (0.01 + 0.001 * tokens) for tokens in range(1, 33)),
    draft_seconds=0.001,
)


@pytest.fixture
def simulation(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """`simulation(**fields)`: a small simulation on TABLE."""
    save_cost_table(TABLE, tmp_path / "costs.json")

    def make(**fields: Any) -> Config:
        section = {
            "cost_table": str(tmp_path / "costs.json"),
            "concurrency": [1, 4],
            "requests": 4,
            "acceptance": {"requests": 8, "rounds_per_request": 8, "mean_output_tokens": 16},
        }
        return make_config(simulation=section | fields)

    return make


def test_the_job_writes_points_pictures_and_its_config(
    simulation: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(simulation()))
    assert main(["--config", str(path), "simulation.seed=3"]) == 0
    output = tmp_path / "run" / "simulation"
    result = json.loads((output / "simulation.json").read_text())
    assert {(point["policy"], point["concurrency"]) for point in result["points"]} == {
        (policy, users) for policy in POLICIES for users in (1, 4)
    }
    assert result["settings"]["seed"] == 3
    assert result["cost_table"]["steps_per_second"] == list(TABLE.steps_per_second)
    for picture in ("frontier.png", "budget.png", "cost_table.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert "seed: 3" in (output / "config.yaml").read_text()
    shown = capsys.readouterr().out
    assert "acceptance: a formula, costs: measured, t on here" in shown
    assert "dspark_async" in shown


def test_a_saved_result_is_read_back_and_anything_else_is_named(
    simulation: Callable[..., Config], tmp_path: Path
) -> None:
    result = run_simulation(simulation(policies=["none", "dspark"], concurrency=[1]))
    path = tmp_path / "run" / "simulation" / "simulation.json"
    assert load_simulation(path) == result
    for text in ("{", "[]", "{}", json.dumps(json.loads(path.read_text()) | {"points": [{"policy": "none"}]})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"simulation\.json: not a simulation's result"):
            load_simulation(path)
    path.write_text('{"version": 2}')
    with pytest.raises(ConfigError, match="version 2, this program reads 1"):
        load_simulation(path)


def test_a_dry_run_checks_and_writes_nothing(simulation: Callable[..., Config], tmp_path: Path) -> None:
    assert run_simulation(simulation(), dry_run=True) is None
    assert not (tmp_path / "run").exists()


def test_the_table_is_looked_for_where_it_is_measured(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config()
    assert cost_table_path(config) == tmp_path / "run" / "cost_table.json"
    save_cost_table(TABLE, cost_table_path(config))
    assert prepare(config).table == TABLE


def test_recorded_rounds_are_replayed_and_what_is_left_out_is_said(
    simulation: Callable[..., Config], tmp_path: Path
) -> None:
    rounds = tmp_path / "rounds.parquet"
    pq.write_table(pa.Table.from_pylist([row("a", 10, 3), row("a", 14, 1, proposed=1), row("b", 9, 0)]), rounds)
    result = run_simulation(simulation(rounds=str(rounds)))
    assert result is not None
    assert result.block_size == 3
    assert result.source == "2 recorded rounds of 2 answers"
    assert [point.policy for point in result.points if point.concurrency == 1] == [
        policy for policy in POLICIES if policy not in ("static5", "static7")
    ]
    assert result.warnings == (
        "1 of 3 recorded rounds left out: they were cut, so what their whole blocks would have come to is not known",
    )


def test_recorded_confidences_go_through_the_calibration(simulation: Callable[..., Config], tmp_path: Path) -> None:
    rounds, saved = tmp_path / "rounds.parquet", tmp_path / "calibration.json"
    pq.write_table(pa.Table.from_pylist([row("a", 50, 3, confidences=[0.9, 0.8, 0.5])]), rounds)
    saved.write_text(Calibration(temperatures=(2.0, 1.0, 3.0), fitted_on={}, before=(), after=()).to_json())
    prepared = prepare(simulation(rounds=str(rounds), calibration=str(saved)))
    assert prepared.trace.confidences_NK.dtype == np.float32
    np.testing.assert_allclose(prepared.trace.confidences_NK, [[0.75, 0.8, 0.5]], rtol=1e-5)  # odds 9 -> 3
    assert prepared.source == "1 recorded rounds of 1 answers, calibrated"
    with pytest.raises(ConfigError, match=r"simulation\.calibration .*none\.json: cannot read it"):
        prepare(simulation(rounds=str(rounds), calibration=str(tmp_path / "none.json")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ["dspark", "best"]}, r"simulation\.policies: \['best'\] unknown; wanted some of \['none'"),
        (
            {"concurrency": [1, 5]},
            "concurrency 5 x 8 tokens exceeds the cost table, which ends at 32: simulate up to 4",
        ),
        ({"concurrency": [0]}, "wanted numbers of requests from 1 on"),
        ({"concurrency": []}, "wanted numbers of requests from 1 on"),
        ({"temperature": 1.0}, r"set simulation\.rounds"),
        ({"calibration": "c.json"}, r"set simulation\.rounds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    simulation: Callable[..., Config], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_simulation(simulation(**fields))


def test_a_policy_longer_than_the_block_is_refused_when_asked_for(
    simulation: Callable[..., Config], tmp_path: Path
) -> None:
    rounds = tmp_path / "rounds.parquet"
    pq.write_table(pa.Table.from_pylist([row("a", 10, 3)]), rounds)
    with pytest.raises(ConfigError, match=r"\['static5'\] verify more than the 3 drafts of a block"):
        run_simulation(simulation(rounds=str(rounds), policies=["none", "static5"]))


def test_a_missing_table_is_one_line_that_says_how_to_make_one(
    make_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config()))
    assert main(["--config", str(path)]) == 1
    assert "make one with jobs/measure_cost.py" in capsys.readouterr().err


def test_doubtful_tables_are_warned_about(make_config: Callable[..., Config], tmp_path: Path) -> None:
    odd = CostTable(
        device="here",
        target="t",
        kind="measured",
        context_tokens=8,
        tokens=(1, 2, 4),
        steps_per_second=(10.0, 5.0, 7.5),
    )
    save_cost_table(odd, cost_table_path(make_config()))
    assert prepare(make_config()).warnings == (
        "1 of 3 sizes of the cost table run faster than a smaller one, the worst 4 tokens by 50%: the machine was "
        "busy when it was measured (more cost.repeats help)",
        "the cost table holds no cost of drafting: every policy drafts for free",
    )
    assert busy_warnings(TABLE) == []


def test_the_example_table_is_the_roofline_that_the_documentation_states() -> None:
    line = Roofline(
        weight_bytes=8.04e9, flops_per_token=8.04e9, bandwidth=3.8e12, compute=5.5e14, launch_seconds=3e-4, sharpness=4
    )
    draft = Roofline(
        weight_bytes=1.86e9, flops_per_token=1.86e9, bandwidth=3.8e12, compute=5.5e14, launch_seconds=1e-4, sharpness=4
    )
    sizes = [1, 2, 4, *range(8, 2049, 8)]
    made = roofline_table(line, device="H200-like", target="Qwen3-4B", sizes=sizes, draft=draft)
    assert load_cost_table(ROOT / "jobs" / "configs" / "costs" / "h200_like.json") == made
