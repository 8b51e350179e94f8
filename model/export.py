"""Save and load drafters in the layout of the released DSpark checkpoints: config.json + model.safetensors.

vLLM (`method: dspark`) and SGLang load such a folder. The target's embedding and lm_head are absent by design: both
engines take them from the target, and they are frozen here. Every flag that a loader could guess is written out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import DrafterConfig, rope_theta_of
from model.drafter import DSparkDrafter
from model.errors import CheckpointError, DrafterConfigError

ARCHITECTURE = "Qwen3DSparkModel"
_WEIGHTS = "model.safetensors"
# Copies of the target's own matrices that released checkpoints carry; the target's are used instead.
_TARGET_OWNED = frozenset({"embed_tokens.weight", "lm_head.weight"})
# config.json key -> DrafterConfig field, where the two names differ or the value needs no translation.
_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_draft_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "target_layer_ids": "target_layer_ids",
    "num_target_layers": "num_target_layers",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "markov_head_type": "markov_head_type",
    "markov_rank": "markov_rank",
    "enable_confidence_head": "enable_confidence_head",
    "confidence_head_with_markov": "confidence_head_with_markov",
    "sample_from_anchor": "sample_from_anchor",
}
# What the drafter is, whatever its configuration; a checkpoint that says otherwise would be run wrongly.
_CONSTANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}


def config_json(config: DrafterConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a drafter: Hugging Face Qwen3 fields and DSpark's own, none left to a default."""
    data = config.to_dict()
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        **_CONSTANTS,
        "layer_types": list(config.layer_types),
        # vLLM takes sliding layers for causal unless told otherwise.
        **({} if config.sliding_window is None else {"sliding_window": config.sliding_window, "is_causal": False}),
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        **{key: data[field] for key, field in _FIELDS.items()},
    }


def config_from_json(data: Mapping[str, Any], *, source: str) -> DrafterConfig:
    """The inverse. Raises CheckpointError naming `source` and every missing or contradicting field."""
    missing = [key for key in _FIELDS if key not in data]
    if missing:
        raise CheckpointError(
            f"{source}: no {', '.join(missing)}; wanted a DSpark checkpoint with every field explicit"
        )
    wrong = {key: data[key] for key, value in _CONSTANTS.items() if data.get(key, value) != value}
    if data.get("architectures") != [ARCHITECTURE]:
        wrong["architectures"] = data.get("architectures")
    sliding = "sliding_attention" in (data.get("layer_types") or ())
    if sliding and data.get("is_causal") is not False:
        wrong["layer_types"] = f"{data['layer_types']} with is_causal {data.get('is_causal')}"
    if wrong:
        raise CheckpointError(
            f"{source}: {wrong} is not what this drafter computes; wanted {ARCHITECTURE}, {_CONSTANTS}"
        )
    fields = {field: data[key] for key, field in _FIELDS.items()}
    fields["kind"] = "dspark"
    # Qwen configs carry a window even when no layer slides.
    fields["sliding_window"] = data.get("sliding_window") if sliding else None
    fields["layer_types"] = data["layer_types"] if sliding else ()
    try:
        return DrafterConfig.from_dict({**fields, "rope_theta": rope_theta_of(data)})
    except DrafterConfigError as error:
        raise CheckpointError(f"{source}: {error}") from error


def save_drafter(directory: str | Path, drafter: DSparkDrafter, extra: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors in the parameters' dtype; returns the folder.

    `extra` (JSON types: provenance, run, step) is stored under the key `provenance`, which no loader reads. Weights are
    written before the config and each file is renamed into place, so a folder with a config.json is complete.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    temporary = folder / f".{_WEIGHTS}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / _WEIGHTS)
    data = config_json(drafter.config, dtype=drafter.dtype) | {"provenance": dict(extra)}
    temporary = folder / ".config.json.tmp"
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "config.json")
    return folder


def load_drafter(directory: str | Path) -> DSparkDrafter:
    """Read a drafter in the dtype it was stored in, on the CPU.

    Raises CheckpointError for an unreadable file and for a missing, unknown or misshapen tensor, naming it.
    """
    folder = Path(directory)
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    config = config_from_json(data, source=str(path))
    try:
        tensors = load_file(folder / _WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / _WEIGHTS}: not readable as safetensors: {error}") from error
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _TARGET_OWNED}
    _check_tensors(tensors, drafter, folder / _WEIGHTS)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.requires_grad_(True)


def _check_tensors(tensors: Mapping[str, Tensor], drafter: DSparkDrafter, path: Path) -> None:
    expected = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {found[name]}, wanted {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        problems.append(f"tensors of different dtypes {sorted({str(t.dtype) for t in tensors.values()})}")
    if problems:
        raise CheckpointError(f"{path}: does not fit its config.json: {'; '.join(problems)}")
