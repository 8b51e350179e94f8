"""The evaluation job: which prompts, which tasks, what is refused, and one real run under Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from jobs.evaluate_drafter import main
from model.drafter import DSparkDrafter
from model.export import save_drafter
from pipeline.acceptance import GreedyCheck, summarise
from pipeline.config import Config, dump_config
from pipeline.drafter_check import current_identity
from pipeline.errors import ConfigError, EvaluationFailed
from pipeline.evaluate import add_agreement, flag_useless, output_folder, require_lossless, run_evaluation
from pipeline.held_out import find_leak, make_chunks, make_tasks, read_held_out
from pipeline.identity import check_target
from pipeline.train.recipe import drafter_config
from tests.pipeline.test_acceptance import GAMMA, make_round
from tests.pipeline.test_eval_actor import make_prompt
from tests.pipeline.test_report import make_report

ROWS = [{"id": f"{domain}-{i}", "domain": domain, "prompt": f"{domain} {i}"} for domain in ("a", "b") for i in range(3)]


@pytest.fixture
def evaluation(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """`evaluation(rows, **fields)`: a config whose evaluation reads these held-out rows."""

    def make(rows: list[Any], **fields: Any) -> Config:
        path = tmp_path / "held_out.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        section = {"prompts": [str(path)], "max_new_tokens": 8, "threads_per_actor": 1, **fields}
        return make_config(evaluation=section)

    return make


def test_the_first_prompts_of_each_domain_are_taken_in_order(evaluation: Callable[..., Config]) -> None:
    rows = [*ROWS, {"id": "bad", "messages": []}, {"id": "none", "prompt": "no domain"}]
    held_out = read_held_out(evaluation(rows, limit_per_domain=2))
    assert [p.sample_id for p in held_out.prompts] == ["a-0", "a-1", "b-0", "b-1", "none"]
    assert len(held_out.rejected) == 1
    assert "held_out.jsonl:7" in held_out.rejected[0]


def test_no_usable_prompt_is_an_error_with_the_first_reason(evaluation: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"no usable prompt in 1 rows; the first: .*held_out\.jsonl:1"):
        read_held_out(evaluation([{"id": "bad", "messages": []}]))


def test_tasks_cover_prompts_and_temperatures_and_bound_the_targets_share() -> None:
    prompts = [make_prompt(0), make_prompt(1), replace(make_prompt(2), domain="code")]
    tasks = list(make_tasks(prompts, (0.0, 1.0), 1))
    assert [(t.prompt.sample_id, t.temperature, t.with_target) for t in tasks] == [
        ("p0", 0.0, True),
        ("p0", 1.0, True),
        ("p1", 0.0, False),
        ("p1", 1.0, False),
        ("p2", 0.0, True),
        ("p2", 1.0, True),
    ]
    assert all(task.with_target for task in make_tasks(prompts, (0.0,), None))


def test_chunks_hold_one_temperature_and_occupy_every_actor() -> None:
    tasks = list(make_tasks([make_prompt(i) for i in range(10)], (0.0, 1.0), None))
    chunks = make_chunks(tasks, num_actors=3, batch_size=2)
    assert [len(chunk) for chunk in chunks] == [4, 4, 2, 4, 4, 2]
    assert all(len({task.temperature for task in chunk}) == 1 for chunk in chunks)
    assert sorted(repr(task) for chunk in chunks for task in chunk) == sorted(map(repr, tasks))
    assert max(len(chunk) for chunk in make_chunks(tasks, num_actors=1, batch_size=1)) == 4


def test_prompts_that_were_trained_on_are_named(evaluation: Callable[..., Config], tmp_path: Path) -> None:
    training = tmp_path / "training.jsonl"
    training.write_text('{"id": "x", "prompt": "B  1"}\n{"id": "y", "turns": ["A 2", "more"]}\n{"broken"\n')
    config = evaluation(ROWS)
    prompts = config.prompts.model_copy(update={"sources": (str(training),)})
    config = config.model_copy(update={"prompts": prompts})
    leak = find_leak(config, read_held_out(config).prompts)
    assert (leak.compared, leak.prompt_ids, leak.problem) == (3, ("a-2", "b-1"), None)
    gone = config.model_copy(update={"prompts": prompts.model_copy(update={"sources": ("nowhere.jsonl",)})})
    assert "nowhere.jsonl: no such file" in (find_leak(gone, read_held_out(config).prompts).problem or "")


def test_a_drafter_that_contributes_nothing_is_called_so() -> None:
    useless = [make_round(0, prompt=f"m{i}") for i in range(4)]
    summaries = tuple(summarise(useless, block_size=GAMMA, seed=0))
    warned = flag_useless(make_report(acceptance=summaries)).warnings
    assert "contributes nothing at temperature 0: τ 1.00" in warned[0]
    assert flag_useless(make_report()).warnings == ()


def test_agreement_takes_the_temperature_nearest_to_training() -> None:
    report = add_agreement(make_report(agreement=None), 1.9)
    assert report.agreement.temperature == 1.0
    assert report.agreement.measured == 2.0
    assert report.warnings == ()
    disagreeing = add_agreement(make_report(agreement=None), 6.0)
    assert "training expected an accepted length of 6.00, decoding gave 2.00" in disagreeing.warnings[0]
    assert "unknown" in add_agreement(make_report(agreement=None), None).warnings[0]


def test_float32_must_be_lossless_and_bfloat16_is_only_reported(make_config: Callable[..., Config]) -> None:
    broken = GreedyCheck(drafter="trained", compared=2, equal=1, differences=(("p1", 0, 4),))
    report = make_report(greedy=(broken,))
    with pytest.raises(EvaluationFailed, match=r"changed 1 of 2 answers .*prompt p1, turn 0, token 4"):
        require_lossless(make_config(), report)
    require_lossless(make_config(evaluation={"dtype": "bfloat16"}), report)
    require_lossless(make_config(), make_report())


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"prompts": []}, "evaluation.prompts is empty"), ({"temperatures": []}, "evaluation.temperatures is empty")],
)
def test_empty_settings_are_refused(fields: dict[str, Any], message: str, evaluation: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=message):
        run_evaluation(evaluation(ROWS, **fields))


def test_job_measures_an_exported_drafter_and_writes_everything(
    evaluation: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = evaluation(ROWS[:4], limit_per_domain=1, num_actors=2)
    drafter = DSparkDrafter(drafter_config(config)).init_weights(1).to(torch.float32)
    identity = current_identity(config, check_target(config))
    run = Path(config.training.output)
    save_drafter(run / "drafter", drafter, {f"cache.{name}": value for name, value in identity.items()})
    (run / "metrics.jsonl").write_text('{"step": 1, "tau": 1.0}\n')
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))

    assert main(["--config", str(file), "--dry-run"]) == 0
    assert not output_folder(config).exists()
    assert main(["--config", str(file)]) == 0

    shown = capfd.readouterr().out
    assert "evaluate     12/12 answers (100 %)" in shown
    for title in ("Accepted length per domain", "Acceptance by position", "Untrained vs trained"):
        assert title in shown
    data = json.loads((output_folder(config) / "report.json").read_text())
    assert data["settings"]["first_rendered_prompts"][0].startswith("<|im_start|>user\na 0")
    assert [check["equal"] for check in data["greedy"]] == [2, 2]
    rounds = pq.read_table(output_folder(config) / "rounds.parquet")
    assert data["counts"]["rounds"] == rounds.num_rows > 0
    assert set(rounds["domain"].to_pylist()) == {"a", "b"}
    assert set(rounds["drafter"].to_pylist()) == {"trained", "untrained"}
    assert pq.read_table(output_folder(config) / "decodes.parquet").num_rows == 2 * 2 * 3
    assert (output_folder(config) / "report.md").read_text().startswith("# Evaluation of test")
