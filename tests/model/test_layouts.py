"""config.json of the three layouts, compared with what the released checkpoints and the engines' readers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.config import DrafterConfig
from model.errors import CheckpointError
from model.layouts import config_from_json, config_json, layout_of, needs_zero_head
from tests.golden_data import drafter_config

NO_HEADS = {
    "markov_head_type": "none",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
# The fields that the released dspark checkpoints have, at Qwen3-4B's sizes; there is no sample_from_anchor among them.
RELEASED_DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# As the released DFlash drafters write it: γ+1 inputs, ids under dflash_config, the rope base in the old style.
_NOT_IN_DFLASH = ("markov_head_type", "rope_parameters", "mask_token_id", "target_layer_ids")
RELEASED_DFLASH: dict[str, Any] = {
    **{key: value for key, value in RELEASED_DSPARK.items() if key not in _NOT_IN_DFLASH},
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "rope_theta": 1000000,
    "rope_scaling": None,
}


def dflash(**overrides: Any) -> DrafterConfig:
    return drafter_config(**{"kind": "dflash", "sample_from_anchor": False, **NO_HEADS, **overrides})


def eagle3(**overrides: Any) -> DrafterConfig:
    return drafter_config(**{"kind": "eagle3", "num_draft_layers": 1, **NO_HEADS, **overrides})


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    kind = draw(st.sampled_from(["dspark", "dflash", "eagle3"]))
    layers = tuple(sorted(draw(st.sets(st.integers(-1, 6), min_size=1))))
    block, vocab = draw(st.integers(1, 16)), draw(st.integers(1, 199))
    common: dict[str, Any] = {"target_layer_ids": layers, "block_size": block, "draft_vocab_size": vocab}
    if kind == "eagle3":
        return eagle3(**common)
    common["sample_from_anchor"] = draw(st.booleans())
    if draw(st.booleans()):
        common |= {"sliding_window": draw(st.integers(1, 64)), "layer_types": ("sliding_attention", "full_attention")}
    if kind == "dflash":
        return dflash(**common)
    head = draw(st.sampled_from(["none", "vanilla", "gated", "rnn"]))
    with_confidence = draw(st.booleans())
    return drafter_config(
        **common,
        markov_head_type=head,
        markov_rank=0 if head == "none" else draw(st.integers(1, 9)),
        enable_confidence_head=with_confidence,
        confidence_head_with_markov=with_confidence and head != "none" and draw(st.booleans()),
    )


@given(configs())
def test_every_configuration_comes_back(config: DrafterConfig) -> None:
    assert config_from_json(config_json(config, dtype=torch.bfloat16), source="here") == config


def test_the_released_dspark_checkpoint_is_understood() -> None:
    config = config_from_json(RELEASED_DSPARK, source="here")
    assert (config.kind, config.block_size, config.sample_from_anchor, config.num_inputs) == ("dspark", 7, True, 7)
    assert (config.markov_head_type, config.markov_rank, config.mask_token_id) == ("vanilla", 256, 151669)
    assert (config.rope_theta, config.draft_vocab_size, config.sliding_window) == (1e6, 151936, None)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    # What is written back says everything that the released file says, and only adds to it.
    written = config_json(config, dtype=torch.bfloat16)
    expected = {key: value for key, value in RELEASED_DSPARK.items() if key not in ("num_anchors", "max_window_layers")}
    assert {key: written[key] for key in expected} == expected
    added = {"draft_vocab_size", "drafter_kind", "rope_theta", "sample_from_anchor", "zero_markov_head"}
    assert written.keys() - RELEASED_DSPARK.keys() == added


def test_the_released_dflash_checkpoint_is_understood() -> None:
    config = config_from_json(RELEASED_DFLASH, source="here")
    assert (config.kind, config.block_size, config.num_inputs, config.markov_rank) == ("dflash", 15, 16, 0)
    assert not config.sample_from_anchor
    written = config_json(config, dtype=torch.bfloat16)
    assert written["block_size"] == 16
    assert written["dflash_config"] == {**RELEASED_DFLASH["dflash_config"], "causal": False}


@pytest.mark.parametrize("layers", [(0,), (-1, 3, 6), (1, 3, 5)])
def test_layer_ids_of_each_engine(layers: tuple[int, ...]) -> None:
    """0-based outputs in the dspark and dflash layouts; inputs, one higher, in the eagle3 layout (-1 is 0)."""
    assert config_json(drafter_config(target_layer_ids=layers), dtype=torch.float32)["target_layer_ids"] == list(layers)
    nested = config_json(dflash(target_layer_ids=layers), dtype=torch.float32)["dflash_config"]
    assert nested["target_layer_ids"] == list(layers)
    counted = config_json(eagle3(target_layer_ids=layers), dtype=torch.float32)
    assert counted["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in layers]
    assert counted["num_aux_hidden_states"] == len(layers)


def test_which_layout_a_drafter_goes_into() -> None:
    assert layout_of(drafter_config()) == "dspark"
    assert layout_of(dflash()) == "dflash"
    assert not needs_zero_head(dflash())
    # DFlash in the anchor-first layout: only the dspark method of the engines runs it.
    anchor_first = dflash(sample_from_anchor=True)
    assert layout_of(anchor_first) == "dspark"
    assert needs_zero_head(anchor_first)
    written = config_json(anchor_first, dtype=torch.float32)
    assert (written["markov_head_type"], written["markov_rank"], written["zero_markov_head"]) == ("vanilla", 1, True)
    assert layout_of(eagle3()) == "eagle3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            r"architectures \['Qwen3ForCausalLM'\] is not .* Qwen3DSparkModel, DF",
        ),
        ({"architectures": None}, "architectures"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, "'rope_type': 'yarn'"),
        ({"dflash_config": {"causal": True}}, "'dflash_config.causal': True"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 8}, "'dflash_config.causal': None"),
        ({"block_size": ...}, "no block_size; wanted a checkpoint in the dspark layout"),
        ({"markov_head_type": "other"}, "here: markov_head_type 'other' is unknown"),
    ],
)
def test_what_would_be_run_wrongly_is_refused(change: dict[str, Any], message: str) -> None:
    data = {key: value for key, value in {**RELEASED_DSPARK, **change}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=message):
        config_from_json(data, source="here")


def test_the_dflash_layout_has_its_own_rules() -> None:
    with pytest.raises(CheckpointError, match="'sample_from_anchor': True"):
        config_from_json({**RELEASED_DFLASH, "sample_from_anchor": True}, source="here")
    data = {key: value for key, value in RELEASED_DFLASH.items() if key != "dflash_config"}
    with pytest.raises(CheckpointError, match=r"no mask_token_id, target_layer_ids; wanted .* dflash layout"):
        config_from_json(data, source="here")


def test_the_eagle3_layout_has_its_own_rules() -> None:
    data = config_json(eagle3(), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="'norm_before_residual': True"):
        config_from_json({**data, "norm_before_residual": True}, source="here")
    del data["eagle_aux_hidden_state_layer_ids"]
    with pytest.raises(CheckpointError, match=r"no target_layer_ids; wanted .* eagle3 layout"):
        config_from_json(data, source="here")


def test_transformers_keeps_the_window_only_where_layers_slide() -> None:
    """vLLM reads the window from transformers' config class, which drops it unless use_sliding_window is set."""
    from transformers import Qwen3Config

    sliding = drafter_config(sliding_window=8, layer_types=("sliding_attention", "full_attention"))
    for config, window in ((sliding, 8), (drafter_config(), None)):
        read = Qwen3Config(**config_json(config, dtype=torch.bfloat16))
        assert (read.sliding_window, read.layer_types) == (window, list(config.layer_types))


def sglang_requires(data: dict[str, Any], target_layers: int, target_vocab: int) -> list[str]:
    """What SGLang's readers insist on, restated from their behaviour; empty when they are content."""
    if data["architectures"] == ["Qwen3DSparkModel"]:
        layers, block, mask = data["target_layer_ids"], data["block_size"], data["mask_token_id"]
        heads = data["markov_rank"] > 0 and data["markov_head_type"] in ("vanilla", "gated", "rnn")
        rules = {"a Markov head": heads, "a block": block >= 1}
    else:
        nested = data["dflash_config"]
        layers, block, mask = nested["target_layer_ids"], data["block_size"], nested["mask_token_id"]
        rules = {"a block with an anchor": block >= 2, "num_target_layers": data["num_target_layers"] == target_layers}
    rules |= {
        "layers that exist": all(0 <= layer < target_layers for layer in layers),
        "a mask token of the target": 0 <= mask < target_vocab,
    }
    return [name for name, holds in rules.items() if not holds]


@pytest.mark.parametrize(
    "config",
    [
        drafter_config(),
        drafter_config(markov_head_type="gated"),
        drafter_config(markov_head_type="rnn", enable_confidence_head=False, confidence_head_with_markov=False),
        drafter_config(**NO_HEADS),
        dflash(sample_from_anchor=True),
        dflash(),
    ],
)
def test_what_sglang_insists_on_is_there(config: DrafterConfig) -> None:
    assert sglang_requires(config_json(config, dtype=torch.bfloat16), 8, 199) == []
    with_embedding = drafter_config(target_layer_ids=(-1, 3))
    found = sglang_requires(config_json(with_embedding, dtype=torch.bfloat16), 8, 199)
    assert found == ["layers that exist"]  # and serving.py says so
