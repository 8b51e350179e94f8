from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.errors import CheckpointError
from model.target_heads import TargetHeads, load_target_heads

EMBEDDING, HEAD = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3) / 7


def write_target(folder: Path, config: dict[str, Any], shards: list[dict[str, Tensor]]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_untied_and_sharded(tmp_path: Path) -> None:
    shards = [{"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": HEAD[0]}, {"lm_head.weight": HEAD}]
    heads = load_target_heads(write_target(tmp_path, {"tie_word_embeddings": False}, shards), dtype=torch.float32)
    assert not heads.tied
    assert torch.equal(heads.embed(torch.tensor([2])), EMBEDDING[2:3])
    assert torch.equal(heads.logits(torch.eye(3)), HEAD.T)


def test_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    # A tied checkpoint may still carry a stale lm_head: the embedding counts.
    shards = [{"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}]
    heads = load_target_heads(write_target(tmp_path, {"tie_word_embeddings": True}, shards), dtype=torch.bfloat16)
    assert heads.lm_head_VD.data_ptr() == heads.embedding_VD.data_ptr()
    assert heads.lm_head_VD.dtype == torch.bfloat16


def test_missing_head_of_an_untied_target_is_an_error(tmp_path: Path) -> None:
    write_target(tmp_path, {"tie_word_embeddings": False}, [{"model.embed_tokens.weight": EMBEDDING}])
    with pytest.raises(CheckpointError, match=r"not tied, yet there is no 'lm_head.weight'"):
        load_target_heads(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("config", [{"model_type": "gemma3_text"}, {"final_logit_softcapping": 30.0}])
def test_targets_that_scale_their_heads_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    write_target(tmp_path, config, [{"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}])
    with pytest.raises(CheckpointError, match="does not reproduce yet"):
        load_target_heads(tmp_path, dtype=torch.float32)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json"):
        load_target_heads(tmp_path, dtype=torch.float32)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"found neither .* nor model.safetensors"):
        load_target_heads(tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        load_target_heads(tmp_path, dtype=torch.float32)


def test_heads_are_frozen_and_outside_checkpoints() -> None:
    heads = TargetHeads.from_tensors(EMBEDDING, HEAD)
    assert list(heads.parameters()) == []
    assert heads.state_dict() == {}
    with pytest.raises(CheckpointError, match="must agree"):
        TargetHeads.from_tensors(EMBEDDING, HEAD[:3])
