from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.drafter import DSparkDrafter
from model.eagle3 import Eagle3Drafter
from model.errors import CheckpointError
from model.export import save_drafter
from model.warm_start import warm_start
from tests.golden_data import drafter_config, golden_blocks, max_error, tensors, tiny_heads
from tests.golden_eagle3 import eagle3_config

NO_HEADS: dict[str, Any] = {
    "kind": "dflash",
    "markov_head_type": "none",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
HEADS = {
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
}


@pytest.fixture
def dflash(tmp_path: Path) -> DSparkDrafter:
    drafter = DSparkDrafter(drafter_config(**NO_HEADS)).init_weights(1)
    save_drafter(tmp_path / "dflash", drafter, {})
    return drafter


def test_dspark_takes_the_backbone_of_dflash_and_names_its_new_heads(tmp_path: Path, dflash: DSparkDrafter) -> None:
    drafter = DSparkDrafter(drafter_config()).init_weights(2)
    untouched = {name: p.clone() for name, p in drafter.named_parameters() if name in HEADS}
    report = warm_start(drafter, tmp_path / "dflash")
    assert set(report.new) == HEADS
    assert set(report.taken) == {name for name, _ in dflash.named_parameters()}
    own = dict(drafter.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in dflash.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in untouched.items())
    assert f"{len(report.taken)} tensors taken; new: markov_head.markov_w1.weight, " in report.text()
    # The same drafts before the new head has learnt anything but its small noise.
    states, heads = tensors("inputs")["target_hidden_states"], tiny_heads()
    hidden = [d.backbone(d.project_context(states), golden_blocks(d.config), heads) for d in (dflash, drafter)]
    assert max_error(*hidden) == 0.0


def test_a_checkpoint_of_the_same_kind_is_taken_whole_and_rounded(tmp_path: Path) -> None:
    source = DSparkDrafter(drafter_config()).init_weights(1)
    save_drafter(tmp_path, source, {})
    drafter = DSparkDrafter(drafter_config()).init_weights(2).bfloat16()
    assert warm_start(drafter, tmp_path).new == ()
    own = dict(drafter.named_parameters())
    assert all(torch.equal(own[name], p.bfloat16()) for name, p in source.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 3, 6)}, r"target_layer_ids is \(1, 3, 5\) there, \(1, 3, 6\) here"),
        ({"mask_token_id": 7}, "mask_token_id is 190 there, 7 here"),
        ({"sample_from_anchor": False}, "sample_from_anchor is True there, False here"),
        ({"intermediate_size": 96}, r"layers.0.mlp.up_proj.weight is \[128, 64\] there, \[96, 64\] here"),
        ({"num_draft_layers": 3}, "layers.2.input_layernorm.weight is missing there"),
        ({"num_draft_layers": 1}, "layers.1.input_layernorm.weight has no place here"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, dflash: DSparkDrafter, changes: dict[str, Any], message: str
) -> None:
    drafter = DSparkDrafter(drafter_config(**changes)).init_weights(2)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        warm_start(drafter, tmp_path / "dflash")
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def test_heads_are_never_dropped_and_kinds_never_mixed(tmp_path: Path, dflash: DSparkDrafter) -> None:
    save_drafter(tmp_path / "dspark", DSparkDrafter(drafter_config()).init_weights(0), {})
    with pytest.raises(CheckpointError, match=r"markov_head.markov_w1.weight has no place here"):
        warm_start(DSparkDrafter(drafter_config(**NO_HEADS)), tmp_path / "dspark")
    with pytest.raises(CheckpointError, match="missing there"):
        warm_start(Eagle3Drafter(eagle3_config()), tmp_path / "dflash")
