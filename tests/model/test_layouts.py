"""The config.json of every kind, and that saving and loading give the same drafter back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.config import DrafterConfig
from model.errors import CheckpointError, DrafterConfigError
from model.export import load_drafter, save_drafter
from model.family import build_drafter
from model.layouts import ARCHITECTURES, kind_of
from tests.golden_data import drafter_config
from tests.golden_eagle3 import eagle3_config
from tests.model.test_warm_start import NO_HEADS

SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 64}
CONFIGS = {
    "dspark": drafter_config(),
    "dspark, sliding": drafter_config(**SLIDING),
    "dflash": drafter_config(**NO_HEADS),
    "dflash, anchor slot silent": drafter_config(**NO_HEADS, sample_from_anchor=False),
    "eagle3": eagle3_config(block_size=7),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    drafter = build_drafter(config)
    drafter.init_weights(3)
    loaded = load_drafter(save_drafter(tmp_path, drafter, {}))
    assert type(loaded) is type(drafter)
    assert loaded.config == config
    expected = drafter.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.state_dict().items())
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [ARCHITECTURES[config.kind]]


def saved(folder: Path, config: DrafterConfig) -> dict[str, Any]:
    drafter = build_drafter(config)
    drafter.init_weights(0)
    save_drafter(folder, drafter, {})
    return json.loads((folder / "config.json").read_text())


def test_what_engines_read_of_dflash(tmp_path: Path) -> None:
    data = saved(tmp_path, CONFIGS["dflash, anchor slot silent"])
    assert data["dflash_config"] == {
        "mask_token_id": 190,
        "target_layer_ids": [1, 3, 5],
        "sample_from_anchor": False,
        "causal": False,
    }
    assert data["architectures"] == ["DFlashDraftModel"]
    assert not any(name.startswith(("markov", "conf")) for name in load_file(tmp_path / "model.safetensors"))


def test_what_engines_read_of_eagle3(tmp_path: Path) -> None:
    data = saved(tmp_path, CONFIGS["eagle3"])
    assert data["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4, 6, 7]
    assert data["num_aux_layers"] == 5
    assert data["num_hidden_layers"] == 1
    assert not any(data[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["fc.weight"] == [64, 320]
    assert shapes["layers.0.self_attn.q_proj.weight"] == [64, 128]
    assert shapes["layers.0.hidden_norm.weight"] == [64]


def test_sliding_layers_say_that_they_look_both_ways(tmp_path: Path) -> None:
    data = saved(tmp_path, CONFIGS["dspark, sliding"])
    assert (data["sliding_window"], data["is_causal"]) == (64, False)
    data.pop("is_causal")
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="layer_types"):
        load_drafter(tmp_path)


def test_a_config_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    data = saved(tmp_path, CONFIGS["eagle3"])
    (tmp_path / "config.json").write_text(json.dumps({**data, "norm_before_residual": True}))
    with pytest.raises(CheckpointError, match=r"norm_before_residual.*contradicts"):
        load_drafter(tmp_path)
    assert kind_of(["Qwen3ForCausalLM"]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "dflash"}, "a drafter of kind dflash has no choice here: markov_head_type is 'vanilla'"),
        ({**NO_HEADS, "kind": "eagle3"}, "num_draft_layers is 2, wanted 1"),
        ({"kind": "medusa"}, "kind 'medusa' is unknown"),
        ({"sliding_window": 8}, "sliding_window 8 and layer_types"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window None and layer_types"),
        ({"layer_types": ("full_attention",)}, "for each of the 2 draft layers"),
        ({**SLIDING, "sliding_window": 0}, "must be at least 1"),
    ],
)
def test_kinds_and_windows_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterConfigError, match=message):
        drafter_config(**changes)
