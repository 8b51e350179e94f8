from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import DrafterConfig, DrafterShape
from model.errors import DrafterConfigError
from tests.golden_data import GOLDEN, drafter_config
from tests.model.test_warm_start import NO_HEADS


def shape(**overrides: Any) -> DrafterShape:
    settings: dict[str, Any] = {
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": 190,
        "block_size": 7,
        "num_draft_layers": 2,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    return DrafterShape(**{**settings, **overrides})


def target_config() -> dict[str, Any]:
    return json.loads(Path(GOLDEN / "target_tiny_config" / "config.json").read_text())


def test_what_is_not_chosen_follows_the_target() -> None:
    assert DrafterConfig.from_target(target_config(), shape=shape()) == drafter_config()


def test_chosen_sizes_win() -> None:
    config = DrafterConfig.from_target(target_config(), shape=shape(num_key_value_heads=1, intermediate_size=96))
    assert (config.num_key_value_heads, config.intermediate_size, config.num_attention_heads) == (1, 96, 4)


def test_old_style_configs_without_head_dim_and_rope_parameters() -> None:
    old = target_config()
    for key in ("head_dim", "num_key_value_heads", "rope_parameters"):
        del old[key]
    config = DrafterConfig.from_target({**old, "rope_theta": 5e5}, shape=shape())
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 4, 5e5)


def test_a_target_with_two_rope_bases_gives_that_of_full_attention() -> None:
    bases = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = DrafterConfig.from_target({**target_config(), "rope_parameters": bases}, shape=shape())
    assert config.rope_theta == 1e6


@pytest.mark.parametrize("size", [0, 199])
def test_the_whole_vocabulary_is_written_out(size: int) -> None:
    config = DrafterConfig.from_target(target_config(), shape=shape(draft_vocab_size=size))
    assert config.draft_vocab_size == 199
    assert not config.reduces_vocabulary
    assert DrafterConfig.from_target(target_config(), shape=shape(draft_vocab_size=198)).reduces_vocabulary
    with pytest.raises(DrafterConfigError, match="draft_vocab_size is 200; wanted 1 to the target's 199"):
        drafter_config(draft_vocab_size=200)


def test_dict_round_trip_is_strict() -> None:
    data = json.loads(json.dumps(drafter_config().to_dict()))
    assert DrafterConfig.from_dict(data) == drafter_config()
    with pytest.raises(DrafterConfigError, match=r"unknown keys \['blok_size'\]"):
        DrafterConfig.from_dict({**data, "blok_size": 7})
    for field, value in (("block_size", None), ("sample_from_anchor", "no"), ("target_layer_ids", [1, "3"])):
        with pytest.raises(DrafterConfigError, match=rf"\{{'{field}': .*wrong JSON types"):
            DrafterConfig.from_dict({**data, field: value})
    del data["sample_from_anchor"]
    with pytest.raises(DrafterConfigError, match=r"missing keys \['sample_from_anchor'\]"):
        DrafterConfig.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"mask_token_id": 199}, "mask token id 199 is no row"),
        ({"target_layer_ids": (1, 7)}, r"\[7\] do not exist or are the final layer"),
        ({"target_layer_ids": (-2, 1)}, r"\[-2\] do not exist"),
        ({"target_layer_ids": (3, 1)}, "must be ascending"),
        ({"markov_rank": 0}, "rank 0 goes with type none"),
        ({"markov_head_type": "lstm"}, "'lstm' is unknown"),
        ({"num_key_value_heads": 3}, "multiple of"),
        ({"head_dim": 15}, "even"),
        ({"markov_head_type": "none", "markov_rank": 0}, "confidence_head_with_markov needs a Markov head"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterConfigError, match=message):
        drafter_config(**change)


def test_embedding_and_last_legal_layer_are_allowed() -> None:
    assert drafter_config(target_layer_ids=(-1, 6)).target_layer_ids == (-1, 6)


def test_a_config_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(DrafterConfigError, match="has no 'num_attention_heads'"):
        DrafterConfig.from_target({"hidden_size": 3}, shape=shape())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "dflash"}, "a drafter of kind dflash has no choice here: markov_head_type is 'vanilla'"),
        ({**NO_HEADS, "kind": "eagle3"}, "num_draft_layers is 2, wanted 1"),
        ({"kind": "medusa"}, "kind 'medusa' is unknown"),
        ({"sliding_window": 8}, "sliding_window 8 and layer_types"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window None and layer_types"),
        ({"layer_types": ("full_attention",)}, "for each of the 2 draft layers"),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 0}, "must be at least 1"),
    ],
)
def test_kinds_and_windows_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterConfigError, match=message):
        drafter_config(**changes)


def test_windows_by_layer() -> None:
    config = drafter_config(layer_types=("sliding_attention", "full_attention"), sliding_window=9)
    assert [config.window(layer) for layer in range(2)] == [9, None]
    assert drafter_config().layer_types == ("full_attention",) * 2
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
