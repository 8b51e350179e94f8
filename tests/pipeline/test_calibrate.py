"""The calibration job on recorded rounds: what it fits on, what it writes, what it warns about."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cache_store.identity import digest_weights
from jobs.calibrate_drafter import main
from model.decoding.calibration import from_json
from model.drafter import DSparkDrafter
from model.export import load_drafter, save_drafter
from model.target_heads import load_target_heads
from pipeline.acceptance import RoundRow
from pipeline.calibrate import find_weaknesses, fold_drafter, run_calibration, split_rounds
from pipeline.config import Config, TargetSection, dump_config
from pipeline.drafter_check import TEMPERATURES_KEY
from pipeline.errors import ConfigError
from pipeline.html_report import REPORT_JSON, output_folder
from pipeline.report import DRAFTER_WEIGHTS
from pipeline.rounds_table import write_tables
from pipeline.train.worker import DRAFTER
from tests.golden_data import drafter_config
from tests.pipeline.hf_target import HIDDEN, VOCAB, save_tiny_target
from tests.pipeline.test_acceptance import make_round
from tests.pipeline.test_report import make_report

GAMMA, PROMPTS = 3, 40


def overconfident(rounds_per_prompt: int, *, temperature: float = 1.0) -> list[RoundRow]:
    """Rounds whose confidence logits are twice the true ones."""
    rng = np.random.default_rng(0)
    rows = []
    for prompt in range(PROMPTS):
        for _ in range(rounds_per_prompt):
            logits = rng.normal(1.0, 1.2, GAMMA)
            accepted = int(np.cumprod(rng.random(GAMMA) < 1 / (1 + np.exp(-logits))).sum())
            confidences = tuple((1 / (1 + np.exp(-2 * logits))).tolist())
            rows.append(make_round(accepted, prompt=f"p{prompt}", confidences=confidences, temperature=temperature))
    return rows


@pytest.fixture
def evaluated(make_config: Callable[..., Config]) -> Callable[..., Config]:
    """`evaluated(rows, **calibration)`: a config whose evaluation recorded these rounds of an exported drafter."""

    def make(rows: Sequence[RoundRow], **calibration: Any) -> Config:
        config = make_config(calibration=calibration)
        folder = output_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(folder, rows, [])
        drafter = DSparkDrafter(drafter_config(block_size=GAMMA)).init_weights(0)
        exported = save_drafter(Path(config.training.output) / DRAFTER, drafter, {"step": 7})
        report = make_report(settings={DRAFTER_WEIGHTS: digest_weights(exported)})
        (folder / REPORT_JSON).write_text(report.to_json())
        return config

    return make


def test_job_fits_saves_exports_and_redraws_the_page(evaluated: Callable[..., Config], tmp_path: Path) -> None:
    rows = [*overconfident(200), make_round(0, drafter="untrained", confidences=(0.5,) * GAMMA)]
    config = evaluated(rows, folded=str(tmp_path / "folded"))
    folder, drafter = output_folder(config), Path(config.training.output) / DRAFTER
    before = json.loads((drafter / "config.json").read_text())
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))

    assert main(["--config", str(file), "--dry-run"]) == 0
    assert not (folder / "calibration.json").exists()
    assert main(["--config", str(file)]) == 0

    calibration = from_json((folder / "calibration.json").read_text(), source="")
    assert all(1.4 < temperature < 3.5 for temperature in calibration.temperatures)  # 2, as far as 4,000 rounds tell
    worst = [max(q.prefix.ece for q in part if q.prefix) for part in (calibration.before, calibration.after)]
    assert worst[1] < 0.05 < worst[0]
    assert (calibration.fitted_on["rounds"], calibration.fitted_on["checked_prompts"]) == (4000, PROMPTS // 2)
    after = json.loads((drafter / "config.json").read_text())
    assert after == before | {TEMPERATURES_KEY: list(calibration.temperatures)}
    assert "Reliability before and after calibration" in (folder / "report.html").read_text()
    shared = calibration.fitted_on["shared_temperature"]
    whole, folded = load_drafter(drafter), load_drafter(tmp_path / "folded")
    for name, tensor in whole.state_dict().items():
        scaled = tensor / shared if name.startswith("confidence_head.") else tensor
        assert torch.allclose(folded.state_dict()[name], scaled), name


def test_split_is_by_prompt_and_does_not_depend_on_the_order() -> None:
    rows = overconfident(3)
    split = split_rounds(rows, 0.25)
    fit, check = ({row.prompt_id for row in part} for part in (split.fit, split.check))
    assert not fit & check
    assert (len(fit), len(check)) == (30, 10)
    again = split_rounds(rows[::-1], 0.25)
    assert {row.prompt_id for row in again.check} == check


def test_weak_evidence_is_named(evaluated: Callable[..., Config]) -> None:
    few = [make_round(1, confidences=(0.5,) * GAMMA, proposed=1)] * 5
    config = evaluated(few)
    warnings = "; ".join(find_weaknesses(config, split_rounds(few, 0.5)))
    assert "fitted on 5 rounds, fewer than calibration.min_rounds 1000" in warnings
    assert "too few prompts to keep any out of the fit" in warnings
    assert "100 % of the rounds were cut before their block ended" in warnings
    enough = overconfident(100)
    assert find_weaknesses(config, split_rounds(enough, 0.5)) == []


def test_unusable_rounds_and_drafters_are_refused(evaluated: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 of 1 rounds have a temperature .*found: \[0.0\]"):
        run_calibration(evaluated([make_round(1, confidences=(0.5,) * GAMMA)], temperatures=[1.0]))
    with pytest.raises(ConfigError, match="none of them confidences"):
        run_calibration(evaluated([make_round(1)]))
    plain = DSparkDrafter(drafter_config(enable_confidence_head=False, confidence_head_with_markov=False))
    save_drafter(tmp_path / "plain", plain.init_weights(0), {})
    with pytest.raises(ConfigError, match="no confidence head to fold"):
        fold_drafter(tmp_path / "plain", tmp_path / "out", 2.0, target=TargetSection(path="unread"))


def test_rounds_of_another_drafter_are_refused(
    evaluated: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = evaluated(overconfident(5))
    folder, exported = output_folder(config), Path(config.training.output) / DRAFTER
    run_calibration(config, dry_run=True)
    save_drafter(exported, DSparkDrafter(drafter_config(block_size=GAMMA)).init_weights(1), {"step": 8})
    with pytest.raises(ConfigError, match=r"the rounds are another drafter's.*evaluate_drafter\.py again"):
        run_calibration(config)
    (folder / REPORT_JSON).unlink()
    run_calibration(config, dry_run=True)
    assert "they were not compared" in capsys.readouterr().out
    save_drafter(exported, DSparkDrafter(drafter_config(block_size=GAMMA + 1)).init_weights(1), {})
    with pytest.raises(ConfigError, match=r"rounds of \[3\] confidences, .* drafts 4"):
        run_calibration(config)


def test_folding_keeps_the_copies_that_a_drafter_carries(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    ids = torch.arange(0, VOCAB, 3)
    heads = load_target_heads(target, dtype=None, draft_ids=ids)
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": len(ids)}
    drafter = DSparkDrafter(drafter_config(**sizes)).init_weights(0)
    drafter.draft_ids = ids
    save_drafter(tmp_path / "reduced", drafter, {}, heads=heads)
    fold_drafter(tmp_path / "reduced", tmp_path / "out", 2.0, target=TargetSection(path=str(target)))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("reduced", "out"))
    assert before.keys() == after.keys()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed == ["confidence_head.proj.weight"]


def test_only_the_asked_temperatures_are_fitted(evaluated: Callable[..., Config]) -> None:
    config = evaluated([*overconfident(20), *overconfident(5, temperature=0.0)], temperatures=[1.0], write_config=False)
    calibration = run_calibration(config)
    assert calibration is not None
    assert calibration.fitted_on["temperatures"] == [1.0]
    assert calibration.fitted_on["rounds"] == 20 * PROMPTS // 2
    drafter = Path(config.training.output) / DRAFTER
    assert TEMPERATURES_KEY not in json.loads((drafter / "config.json").read_text())
