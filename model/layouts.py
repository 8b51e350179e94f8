"""config.json of exported drafters: the layouts of the released checkpoints, every flag written out.

- dspark: `deepseek-ai/dspark_qwen3_*` (Qwen3DSparkModel). A drafter without sequential head, which the engines cannot
  load in this layout, carries a rank-1 head of zeros (`zero_markov_head`): it adds exactly 0.
- dflash: `z-lab/*-DFlash-*` (DFlashDraftModel), for DFlash drafters of the γ+1 block layout. Its `block_size` counts
  the anchor.
- eagle3: an EAGLE-3 drafter with one Qwen3-shaped layer (Eagle3Qwen3ForCausalLM); layer ids count inputs (id + 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from model.config import DrafterConfig, rope_theta_of
from model.errors import CheckpointError, DrafterConfigError

Layout = Literal["dspark", "dflash", "eagle3"]
ARCHITECTURES: Mapping[Layout, str] = {
    "dspark": "Qwen3DSparkModel",
    "dflash": "DFlashDraftModel",
    "eagle3": "Eagle3Qwen3ForCausalLM",
}
ZERO_HEAD_RANK = 1
"""Rank of the head of zeros that stands for none."""

# config.json key -> DrafterConfig field, in every layout.
_BACKBONE = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_draft_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "num_target_layers": "num_target_layers",
}
_DSPARK = (
    "target_layer_ids",
    "block_size",
    "mask_token_id",
    "markov_head_type",
    "markov_rank",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_NO_HEADS = {
    "markov_head_type": "none",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
# What the drafter is, whatever its configuration; a checkpoint that says otherwise would be run wrongly.
_CONSTANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_EAGLE3_CONSTANTS = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
_MISSING: Any = object()


def layout_of(config: DrafterConfig) -> Layout:
    """The layout that a drafter is exported in."""
    if config.kind == "eagle3":
        return "eagle3"
    return "dflash" if config.kind == "dflash" and not config.sample_from_anchor else "dspark"


def needs_zero_head(config: DrafterConfig) -> bool:
    """Whether the export carries a Markov head of zeros in place of none."""
    return layout_of(config) == "dspark" and config.markov_head_type == "none"


def config_json(config: DrafterConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a drafter: Hugging Face Qwen3 fields and the layout's own, none left to a default."""
    data = config.to_dict()
    layout = layout_of(config)
    sliding = config.sliding_window is not None
    return {
        "architectures": [ARCHITECTURES[layout]],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        **_CONSTANTS,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        # vLLM takes sliding layers for causal unless told otherwise.
        **({"dflash_config": {"causal": False}} if sliding else {}),
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        **{key: data[field] for key, field in _BACKBONE.items()},
        "draft_vocab_size": config.draft_vocab_size,
        "drafter_kind": config.kind,
        **{"dspark": _dspark_json, "dflash": _dflash_json, "eagle3": _eagle3_json}[layout](config),
    }


def _dspark_json(config: DrafterConfig) -> dict[str, Any]:
    data = config.to_dict()
    own = {key: data[key] for key in _DSPARK}
    zero = needs_zero_head(config)
    if zero:
        own |= {"markov_head_type": "vanilla", "markov_rank": ZERO_HEAD_RANK}
    return {**own, "zero_markov_head": zero, "sample_from_anchor": config.sample_from_anchor}


def _dflash_json(config: DrafterConfig) -> dict[str, Any]:
    return {
        "block_size": config.num_inputs,
        "sample_from_anchor": False,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "causal": False,
        },
    }


def _eagle3_json(config: DrafterConfig) -> dict[str, Any]:
    return {
        **_EAGLE3_CONSTANTS,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(config.target_layer_ids),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
    }


def config_from_json(data: Mapping[str, Any], *, source: str) -> DrafterConfig:
    """The inverse of config_json, and the reader of released checkpoints.

    Those leave out what their layout allows one value for: `sample_from_anchor` (true in the dspark layout),
    `draft_vocab_size` (the whole vocabulary) and `drafter_kind`. Everything else must be there.
    Raises CheckpointError naming `source` and every missing or contradicting field.
    """
    found = data.get("architectures") or [None]
    layout = next((name for name, architecture in ARCHITECTURES.items() if [architecture] == found), None)
    if layout is None:
        raise CheckpointError(
            f"{source}: architectures {found} is not what this drafter computes; wanted one of "
            f"{', '.join(ARCHITECTURES.values())}"
        )
    _check_constants(data, layout, source)
    own = {"dspark": _read_dspark, "dflash": _read_dflash, "eagle3": _read_eagle3}[layout](data)
    missing = [key for key in _BACKBONE if key not in data] + [key for key, value in own.items() if value is _MISSING]
    if missing:
        raise CheckpointError(
            f"{source}: no {', '.join(missing)}; wanted a checkpoint in the {layout} layout with every field explicit"
        )
    sliding = "sliding_attention" in (data.get("layer_types") or ())
    fields = {
        **{field: data[key] for key, field in _BACKBONE.items()},
        "kind": layout,
        "draft_vocab_size": data.get("draft_vocab_size") or data["vocab_size"],
        # Qwen configs carry a window even when no layer slides.
        "sliding_window": data.get("sliding_window") if sliding else None,
        "layer_types": data["layer_types"] if sliding else (),
        **own,
    }
    try:
        return DrafterConfig.from_dict({**fields, "rope_theta": rope_theta_of(data)})
    except DrafterConfigError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _read_dspark(data: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: data.get(key, _MISSING) for key in _DSPARK}
    if data.get("zero_markov_head"):
        own |= {"markov_head_type": "none", "markov_rank": 0}
    kind = data.get("drafter_kind", "dspark")
    return {**own, "kind": kind, "sample_from_anchor": data.get("sample_from_anchor", True)}


def _read_dflash(data: Mapping[str, Any]) -> dict[str, Any]:
    dflash = data.get("dflash_config") or {}
    block = data.get("block_size", dflash.get("block_size"))
    return {
        **_NO_HEADS,
        "block_size": _MISSING if block is None else block - 1,
        "mask_token_id": dflash.get("mask_token_id", data.get("mask_token_id", _MISSING)),
        "target_layer_ids": dflash.get("target_layer_ids", _MISSING),
        "sample_from_anchor": False,
    }


def _read_eagle3(data: Mapping[str, Any]) -> dict[str, Any]:
    layers = data.get("eagle_aux_hidden_state_layer_ids")
    return {
        **_NO_HEADS,
        "block_size": data.get("block_size", _MISSING),
        "mask_token_id": data.get("mask_token_id", _MISSING),
        "target_layer_ids": _MISSING if layers is None else [layer - 1 for layer in layers],
        "sample_from_anchor": True,
    }


def _check_constants(data: Mapping[str, Any], layout: Layout, source: str) -> None:
    wanted = _CONSTANTS | (_EAGLE3_CONSTANTS if layout == "eagle3" else {})
    wrong = {key: data[key] for key, value in wanted.items() if data.get(key, value) != value}
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        wrong["rope_type"] = rope_type
    causal = (data.get("dflash_config") or {}).get("causal", data.get("is_causal"))
    sliding = "sliding_attention" in (data.get("layer_types") or ())
    if layout != "eagle3" and (causal or (sliding and causal is None)):
        wrong["dflash_config.causal"] = causal
    if layout == "dflash" and data.get("sample_from_anchor"):
        wrong["sample_from_anchor"] = True
    if wrong:
        raise CheckpointError(
            f"{source}: {wrong} is not what this drafter computes; wanted {ARCHITECTURES[layout]}, {wanted}, plain "
            "RoPE and attention in both directions within a block"
        )
