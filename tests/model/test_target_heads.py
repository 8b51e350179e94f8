from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.errors import CheckpointError, DrafterConfigError, UnsupportedTarget
from model.target_heads import TargetHeads, load_final_norm, load_target_heads

EMBEDDING, HEAD = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3) / 7


def write_target(folder: Path, config: dict[str, Any], shards: list[dict[str, Tensor]]) -> Path:
    sizes = {"model_type": "llama", "hidden_size": 3, "vocab_size": 4, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(sizes | config))
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
    with pytest.raises(CheckpointError, match=r"no lm_head among the 1 tensors .*does not tie the two"):
        load_target_heads(tmp_path, dtype=torch.float32)
    write_target(
        tmp_path,
        {},
        [{"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD, "lm_head.bias": HEAD[0].clone()}],
    )
    with pytest.raises(CheckpointError, match=r"lm_head.bias"):
        load_target_heads(tmp_path, dtype=torch.float32)


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path, {"model_type": "phi3"}, [{"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}])
    with pytest.raises(UnsupportedTarget, match=r"config.json: model_type 'phi3' .* supported: llama"):
        load_target_heads(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("wrong", ["embedding", "lm_head"])
def test_shapes_must_be_those_of_the_config(tmp_path: Path, wrong: str) -> None:
    tensors = {"embedding": EMBEDDING, "lm_head": HEAD, wrong: torch.zeros(5, 3)}
    names = {"model.embed_tokens.weight": tensors["embedding"], "lm_head.weight": tensors["lm_head"]}
    write_target(tmp_path, {}, [names])
    with pytest.raises(CheckpointError, match=rf"the {wrong} is \[5, 3\], config.json says vocab_size 4"):
        load_target_heads(tmp_path, dtype=torch.float32)


def test_final_norm(tmp_path: Path) -> None:
    weight, hidden = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([[3.0, 4.0, 0.0]])
    write_target(tmp_path, {"rms_norm_eps": 0.0}, [{"model.norm.weight": weight}])
    expected = hidden / (25 / 3) ** 0.5 * weight
    torch.testing.assert_close(load_final_norm(tmp_path, dtype=torch.float32)(hidden), expected)
    write_target(tmp_path, {}, [{"model.layers.0.norm.weight": weight}])
    with pytest.raises(CheckpointError, match="wanted a final norm of 3 weights, found none"):
        load_final_norm(tmp_path, dtype=torch.float32)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json"):
        load_target_heads(tmp_path, dtype=torch.float32)
    write_target(tmp_path, {}, [{"model.norm.weight": HEAD}])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"found neither .* nor model.safetensors"):
        load_target_heads(tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        load_target_heads(tmp_path, dtype=torch.float32)


def test_a_reduced_draft_vocabulary_is_a_selection_of_rows(tmp_path: Path) -> None:
    write_target(tmp_path, {}, [{"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}])
    heads = load_target_heads(tmp_path, dtype=torch.float32, draft_ids=torch.tensor([0, 2]))
    hidden = torch.randn(5, 3)
    assert torch.equal(heads.draft_head_VD, HEAD[[0, 2]])
    assert torch.equal(heads.embed(torch.tensor([1])), EMBEDDING[1:2])  # context may hold any token
    torch.testing.assert_close(heads.draft_logits(hidden), heads.logits(hidden)[:, [0, 2]])
    wide = heads.to_target(heads.draft_logits(hidden))
    assert wide.shape == (5, 4)
    assert torch.equal(wide.isinf(), torch.tensor([False, True, False, True]).expand(5, 4))
    assert torch.equal(wide[:, [0, 2]], heads.draft_logits(hidden))
    q = wide.softmax(-1)
    assert torch.equal(q[:, [1, 3]], torch.zeros(5, 2))
    whole = load_target_heads(tmp_path, dtype=torch.float32)
    assert whole.draft_head_VD is whole.lm_head_VD
    assert whole.to_target(hidden) is hidden
    with pytest.raises(DrafterConfigError, match="1 ids outside the target's 0 to 3, the first 4"):
        load_target_heads(tmp_path, dtype=torch.float32, draft_ids=torch.tensor([0, 4]))


def test_heads_are_frozen_and_outside_checkpoints() -> None:
    heads = TargetHeads.from_tensors(EMBEDDING, HEAD)
    assert list(heads.parameters()) == []
    assert heads.state_dict() == {}
    with pytest.raises(CheckpointError, match="must agree"):
        TargetHeads.from_tensors(EMBEDDING, HEAD[:3])
