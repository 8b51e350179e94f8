"""The evaluation job: which prompts, which tasks, what is refused, and one real run under Ray."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from cache_store.identity import digest_weights
from jobs.evaluate_drafter import main
from model.drafter import DSparkDrafter
from model.export import save_drafter
from pipeline.acceptance import GreedyCheck, summarise
from pipeline.config import Config, dump_config
from pipeline.drafter_check import current_identity
from pipeline.errors import ConfigError, EvaluationFailed
from pipeline.evaluate import add_agreement, flag_useless, require_lossless, run_evaluation
from pipeline.html_report import output_folder
from pipeline.identity import check_target
from pipeline.report import DRAFTER_WEIGHTS
from pipeline.train.recipe import drafter_config
from tests.pipeline.test_acceptance import GAMMA, make_round
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


def export_untrained(config: Config, **shape: Any) -> Path:
    """A drafter with fresh weights that says it was trained for the config's target."""
    drafter = DSparkDrafter(dataclasses.replace(drafter_config(config), **shape)).init_weights(1).to(torch.float32)
    identity = current_identity(config, check_target(config))
    provenance = {f"cache.{name}": value for name, value in identity.items()}
    return save_drafter(Path(config.training.output) / "drafter", drafter, provenance)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 10_000}, "max_new_tokens 10000 leaves no room for a prompt within"),
        ({"confidence_threshold": 0.5}, "has no confidence head; set it to 0"),
    ],
)
def test_settings_that_no_prompt_could_be_decoded_with_are_refused(
    fields: dict[str, Any], message: str, evaluation: Callable[..., Config]
) -> None:
    config = evaluation(ROWS, **fields)
    export_untrained(config, enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(ConfigError, match=message):
        run_evaluation(config, dry_run=True)


def test_job_measures_an_exported_drafter_and_writes_everything(
    evaluation: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = evaluation(ROWS[:4], limit_per_domain=1, num_actors=2)
    drafter = export_untrained(config)
    run = Path(config.training.output)
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
    assert data["settings"][DRAFTER_WEIGHTS] == digest_weights(drafter)
    assert [check["equal"] for check in data["greedy"]] == [2, 2]
    rounds = pq.read_table(output_folder(config) / "rounds.parquet")
    assert data["counts"]["rounds"] == rounds.num_rows > 0
    assert set(rounds["domain"].to_pylist()) == {"a", "b"}
    assert set(rounds["drafter"].to_pylist()) == {"trained", "untrained"}
    assert pq.read_table(output_folder(config) / "decodes.parquet").num_rows == 2 * 2 * 3
    assert (output_folder(config) / "report.md").read_text().startswith("# Evaluation of test")
