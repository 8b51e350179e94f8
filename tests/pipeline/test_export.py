"""The export job on a real training checkpoint, an exported drafter and a released one, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.export_drafter import main
from model.drafter import DSparkDrafter
from model.errors import CheckpointError
from model.export import load_drafter, save_drafter
from model.target_heads import load_target_heads
from pipeline.config import Config, dump_config
from pipeline.drafter_check import check_drafter, current_identity
from pipeline.errors import ConfigError, ExportFailed
from pipeline.export import ExportOptions, run_export
from pipeline.identity import check_target
from pipeline.train.checkpoint import CheckpointState, ParameterState, save_checkpoint
from pipeline.train.recipe import TrainingJob, drafter_config, prepare_job
from tests.pipeline.hf_target import VOCAB, save_tiny_target
from tests.pipeline.train.rig import answer_mask, make_cache

MakeConfig = Callable[..., Config]
SMALL = {"num_draft_layers": 1, "block_size": 4, "markov_rank": 8}


def exported(config: Config, **identity: Any) -> Path:
    """`<run>/drafter` as training leaves it."""
    known = {**current_identity(config, check_target(config)), **identity}
    drafter = DSparkDrafter(drafter_config(config)).init_weights(0).bfloat16()
    folder = Path(config.training.output) / "drafter"
    return save_drafter(folder, drafter, {"step": 7, **{f"cache.{name}": value for name, value in known.items()}})


@dataclass(frozen=True)
class Checkpointed:
    config: Config
    job: TrainingJob
    masters: dict[str, torch.Tensor]


@pytest.fixture
def checkpointed(make_config: MakeConfig) -> Callable[..., Checkpointed]:
    """A run with one training checkpoint of random float32 masters."""

    def make(**drafter: Any) -> Checkpointed:
        # The toy cache does not say which target it is of.
        config = make_config(drafter={**SMALL, **drafter}, evaluation={"allow_mismatch": True})
        make_cache(config.cache.url, [answer_mask(40, 10)] * 4, vocab_size=VOCAB)
        job = prepare_job(config)
        masters = dict(DSparkDrafter(job.drafter).init_weights(5).state_dict())
        state = CheckpointState(step=12, adam_step=12, skipped=0, world_size=1, recipe=job.recipe, unchanged=[])
        parameters = {name: ParameterState(value, value, value) for name, value in masters.items()}
        save_checkpoint(job.checkpoints, state, parameters, keep=1)
        return Checkpointed(config, job, masters)

    return make


def test_the_newest_checkpoint_of_the_run_is_exported_in_the_runs_precision(
    checkpointed: Callable[..., Checkpointed], tmp_path: Path
) -> None:
    run = checkpointed()
    report = run_export(run.config, ExportOptions())
    assert report.source.name == "step-00000012"
    assert report.folder == Path(run.config.training.output) / "export"
    loaded = load_drafter(report.folder)
    assert loaded.config == run.job.drafter
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, run.masters[name].bfloat16())
    provenance = json.loads((report.folder / "config.json").read_text())["provenance"]
    assert provenance["step"] == 12
    assert provenance["cache.target"] == "toy"


def test_a_checkpoint_of_another_recipe_is_refused(checkpointed: Callable[..., Checkpointed]) -> None:
    run = checkpointed()
    section = run.config.training.model_copy(update={"lr": 0.5})
    with pytest.raises(ConfigError, match=r"training.lr was 0.0006, now 0.5"):
        run_export(run.config.model_copy(update={"training": section}), ExportOptions())


def test_a_reduced_vocabulary_carries_its_mapping_and_its_rows(
    checkpointed: Callable[..., Checkpointed], tmp_path: Path
) -> None:
    run = checkpointed(draft_vocab_size=400)
    report = run_export(run.config, ExportOptions())
    tensors = load_file(report.folder / "model.safetensors")
    target = load_target_heads(run.config.target.path, dtype=None)
    ids = tensors["d2t"] + torch.arange(400)
    assert ids.tolist() == list(run.job.draft_vocab.ids)  # type: ignore[union-attr]
    assert ids[-1] > 399  # not simply the first 400
    assert torch.equal(tensors["lm_head.weight"], target.lm_head_VD[ids])
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCAB, 8)
    assert tensors["markov_head.markov_w2.weight"].shape == (400, 8)
    assert report.copies == ("lm_head.weight",)
    assert any(warning.blocks and warning.engine == "sglang" for warning in report.warnings)
    loaded = load_drafter(report.folder)
    assert loaded.draft_ids is not None
    assert torch.equal(loaded.draft_ids, ids)
    # The same again, from the exported folder.
    again = run_export(run.config, ExportOptions(checkpoint=report.folder, output=tmp_path / "again"))
    assert load_file(again.folder / "model.safetensors").keys() == tensors.keys()


def test_a_damaged_mapping_or_copy_is_noticed(checkpointed: Callable[..., Checkpointed], tmp_path: Path) -> None:
    run = checkpointed(draft_vocab_size=400)
    folder = run_export(run.config, ExportOptions()).folder
    weights = folder / "model.safetensors"
    good = load_file(weights)
    save_file({**good, "d2t": good["d2t"] + (torch.arange(400) == 0)}, weights)
    with pytest.raises(CheckpointError, match=r"d2t: draft vocabulary maps 1 draft tokens to a target token"):
        run_export(run.config, ExportOptions(checkpoint=folder, output=tmp_path / "out"))
    save_file({**good, "lm_head.weight": good["lm_head.weight"] + 1e-3}, weights)
    report = run_export(run.config, ExportOptions(checkpoint=folder, output=tmp_path / "out"))
    assert any("lm_head.weight" in note and "bit for bit" in note for note in report.notes)
    assert report.copies == ("lm_head.weight",)  # what is written is the target's own


def test_self_contained_holds_the_targets_matrices_bit_for_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(drafter=SMALL)
    source = exported(config)
    plain = run_export(config, ExportOptions(checkpoint=source, output=tmp_path / "plain"))
    assert plain.copies == ()
    report = run_export(config, ExportOptions(checkpoint=source, output=tmp_path / "whole", self_contained=True))
    assert report.copies == ("embed_tokens.weight", "lm_head.weight")
    tensors, target = (
        load_file(report.folder / "model.safetensors"),
        load_file(Path(config.target.path) / "model.safetensors"),
    )
    assert torch.equal(tensors["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(tensors["lm_head.weight"], target["lm_head.weight"])
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert load_drafter(report.folder).dtype == torch.bfloat16


def test_a_gemma_target_puts_the_scaled_embedding_into_the_export(make_config: MakeConfig, tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "gemma", family="gemma2")
    config = make_config(drafter=SMALL, target={"path": str(target)})
    report = run_export(config, ExportOptions(checkpoint=exported(config), output=tmp_path / "out"))
    stored = load_file(report.folder / "model.safetensors")["embed_tokens.weight"]
    heads = load_target_heads(target, dtype=torch.bfloat16)
    assert torch.equal(stored, heads.embed(torch.arange(VOCAB)))
    assert report.copies == ("embed_tokens.weight",)
    blocked = {warning.engine for warning in report.warnings if warning.blocks}
    assert blocked == {"vllm", "sglang"}
    assert "  (vllm cannot: see above)" in report.lines()


def test_weights_that_are_not_finite_are_not_exported(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(drafter=SMALL)
    folder = exported(config)
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportFailed, match=r"1 tensors hold infinite or NaN values, the first norm.weight"):
        run_export(config, ExportOptions(checkpoint=folder, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_another_target_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(drafter=SMALL)
    with pytest.raises(ConfigError, match="weights was other"):
        run_export(config, ExportOptions(checkpoint=exported(config, weights="other"), output=tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"nothing: holds neither a training checkpoint"):
        run_export(config, ExportOptions(checkpoint=tmp_path / "nothing"))


def test_a_released_checkpoint_is_imported_with_its_copies_checked(make_config: MakeConfig, tmp_path: Path) -> None:
    """As released: no flags of ours, embedding and lm_head inside, no provenance."""
    config = make_config(drafter=SMALL)
    folder = exported(config)
    data = json.loads((folder / "config.json").read_text())
    for key in ("sample_from_anchor", "drafter_kind", "zero_markov_head", "draft_vocab_size", "provenance"):
        del data[key]
    (folder / "config.json").write_text(json.dumps({**data, "num_anchors": 512}))
    target = load_file(Path(config.target.path) / "model.safetensors")
    copies = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    save_file({**load_file(folder / "model.safetensors"), **copies}, folder / "model.safetensors")
    report = run_export(config, ExportOptions(checkpoint=folder, output=tmp_path / "out"))
    assert "does not say which target" in report.notes[0]
    written = json.loads((report.folder / "config.json").read_text())
    assert written["sample_from_anchor"] is True
    assert written["provenance"] == {"imported_from": "drafter"}
    checked = check_drafter(report.folder, config, check_target(config))
    assert checked.config == drafter_config(config)


def test_the_calibration_travels_along(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(drafter=SMALL)
    folder = exported(config)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "confidence_temperatures": [1.5, 1.0, 1.0, 2.0]}))
    report = run_export(config, ExportOptions(checkpoint=folder, output=tmp_path / "out"))
    written = json.loads((report.folder / "config.json").read_text())
    assert written["confidence_temperatures"] == [1.5, 1.0, 1.0, 2.0]


def test_the_job_prints_what_was_written(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(drafter=SMALL)
    exported(config)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    argv = ["--config", str(file), "--output", str(tmp_path / "out")]
    assert main([*argv, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("Would export ")
    assert not (tmp_path / "out").exists()
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert f"in the dspark layout to {tmp_path / 'out'}" in out
    assert "layers.*.self_attn.q_proj.weight  1 x [32, 32] bfloat16" in out
    assert "sample_from_anchor = true" in out
    assert '"method": "dspark"' in out
    assert 'num_speculative_tokens": 4' in out
    assert "--speculative-algorithm DSPARK" in out
    shutil.rmtree(Path(config.training.output))
    assert main(argv) == 2
    assert "holds neither" in capsys.readouterr().err
