from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.drafter import DSparkDrafter
from model.errors import CheckpointError
from model.export import check_copies, load_drafter, save_drafter
from tests.golden_data import drafter_config, tensors, tiny_heads
from tests.golden_eagle3 import load_eagle3

LAYER = {
    "input_layernorm.weight": [64],
    "post_attention_layernorm.weight": [64],
    "self_attn.q_proj.weight": [64, 64],
    "self_attn.k_proj.weight": [32, 64],
    "self_attn.v_proj.weight": [32, 64],
    "self_attn.o_proj.weight": [64, 64],
    "self_attn.q_norm.weight": [16],
    "self_attn.k_norm.weight": [16],
    "mlp.gate_proj.weight": [128, 64],
    "mlp.up_proj.weight": [128, 64],
    "mlp.down_proj.weight": [64, 128],
}
# Names and shapes of the released layout at this size (vLLM's and SGLang's loaders want exactly these).
RELEASED = {
    "fc.weight": [64, 192],
    "hidden_norm.weight": [64],
    "norm.weight": [64],
    "markov_head.markov_w1.weight": [199, 8],
    "markov_head.markov_w2.weight": [199, 8],
    "confidence_head.proj.weight": [1, 72],
    "confidence_head.proj.bias": [1],
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
}
RELEASED_CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "max_position_embeddings": 512,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "draft_vocab_size": 199,
    "drafter_kind": "dspark",
    "zero_markov_head": False,
    "target_layer_ids": [1, 3, 5],
    "num_target_layers": 8,
    "block_size": 7,
    "mask_token_id": 190,
    "markov_head_type": "vanilla",
    "markov_rank": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
    "provenance": {"step": 3},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_drafter(tmp_path / "drafter", DSparkDrafter(drafter_config()).init_weights(0).bfloat16(), {"step": 3})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    data = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if value is not ...}
    path.write_text(json.dumps(data))


def test_layout_is_the_released_one(saved: Path) -> None:
    assert {name: list(t.shape) for name, t in load_file(saved / "model.safetensors").items()} == RELEASED
    assert json.loads((saved / "config.json").read_text()) == RELEASED_CONFIG
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    modes = {path.stat().st_mode for path in saved.iterdir()}
    assert len(modes) == 1  # a server of another user reads both or neither


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    none = kind == "none"
    config = drafter_config(
        markov_head_type=kind,
        markov_rank=0 if none else 8,
        confidence_head_with_markov=not none,
        sample_from_anchor=none,
        target_layer_ids=(-1, 4),
    )
    drafter = DSparkDrafter(config).init_weights(3).to(dtype)
    loaded = load_drafter(save_drafter(tmp_path, drafter, {}))
    assert loaded.config == config
    assert loaded.dtype == dtype
    expected = drafter.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())


GOLDEN_STATES = {
    f"{head}, confidence {confidence}": (head, confidence)
    for head in ("vanilla", "gated", "rnn")
    for confidence in ("none", "plain", "markov")
}


@pytest.mark.parametrize("case", GOLDEN_STATES)
def test_the_references_own_checkpoint_comes_in_and_goes_out_unchanged(tmp_path: Path, case: str) -> None:
    """Names, shapes and values that the reference saves (golden/README.md), embedding and lm_head included."""
    head, confidence = GOLDEN_STATES[case]
    state = tensors("dspark/state_base", f"dspark/state_markov_{head}")
    if confidence != "none":
        state |= tensors(f"dspark/state_conf_{confidence}")
    fields = {"enable_confidence_head": confidence != "none", "confidence_head_with_markov": confidence == "markov"}
    released = {**RELEASED_CONFIG, "dtype": "float32", "markov_head_type": head, **fields}
    for ours in ("sample_from_anchor", "drafter_kind", "zero_markov_head", "draft_vocab_size", "provenance"):
        del released[ours]
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(released))
    drafter = load_drafter(tmp_path)
    assert drafter.config == drafter_config(markov_head_type=head, **fields)
    assert check_copies(tmp_path, tiny_heads()) == ["embed_tokens.weight", "lm_head.weight"]
    out = save_drafter(tmp_path / "out", drafter, {}, heads=tiny_heads(), self_contained=True)
    written = load_file(out / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value) for name, value in state.items())


def test_the_references_eagle3_checkpoint_too(tmp_path: Path) -> None:
    state = tensors("eagle3/state")
    case = load_eagle3()
    folder = save_drafter(tmp_path, case.drafter, {}, heads=case.heads, self_contained=True)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value) for name, value in state.items())
    assert load_drafter(folder).config == case.drafter.config


def test_copies_that_are_not_the_targets_are_refused(saved: Path) -> None:
    stored = load_file(saved / "model.safetensors")
    heads = tiny_heads()
    assert check_copies(saved, heads) == []
    embedding = heads.embedding_VD.clone()
    embedding[7, 7] += 1e-6
    save_file({**stored, "embed_tokens.weight": embedding}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight \[199, 64\] .* is not the target's .* bit for bit"):
        check_copies(saved, heads)


def test_a_reduced_vocabulary_needs_the_target(tmp_path: Path) -> None:
    drafter = DSparkDrafter(drafter_config(draft_vocab_size=9)).init_weights(0)
    with pytest.raises(CheckpointError, match="pass the target's heads"):
        save_drafter(tmp_path, drafter, {})
    with pytest.raises(CheckpointError, match="different draft vocabularies, or one holds none"):
        save_drafter(tmp_path, drafter, {}, heads=tiny_heads())


def test_a_head_of_zeros_must_be_zeros(tmp_path: Path) -> None:
    none = {"markov_head_type": "none", "markov_rank": 0, "confidence_head_with_markov": False}
    folder = save_drafter(tmp_path, DSparkDrafter(drafter_config(**none)).init_weights(0), {})
    stored = load_file(folder / "model.safetensors")
    assert stored["markov_head.markov_w1.weight"].shape == (199, 1)
    assert load_drafter(folder).markov_head is None  # type: ignore[union-attr]
    stored["markov_head.markov_w2.weight"][5] = 1e-9
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"markov_w2.weight is missing or not zero, yet config.json says"):
        load_drafter(folder)


def test_what_could_be_guessed_must_be_explicit(saved: Path) -> None:
    for key in ("markov_head_type", "mask_token_id", "target_layer_ids", "block_size", "confidence_head_with_markov"):
        before = (saved / "config.json").read_text()
        edit_config(saved, **{key: ...})
        with pytest.raises(CheckpointError, match=f"no {key}"):
            load_drafter(saved)
        (saved / "config.json").write_text(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not what this drafter computes"),
        ({"hidden_act": "gelu"}, "is not what this drafter computes"),
        ({"attention_bias": True}, "is not what this drafter computes"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "is not what this drafter computes"),
        ({"target_layer_ids": [1, 3, 7]}, "final layer"),
        ({"target_layer_ids": [1, 3]}, r"fc.weight is \[64, 192\], wanted \[64, 128\]"),
        ({"num_hidden_layers": 1}, r"layers.1.input_layernorm.weight is unknown"),
        ({"num_hidden_layers": 3}, r"layers.2.input_layernorm.weight is missing"),
        ({"markov_head_type": "rnn"}, r"markov_head.joint_proj.weight is missing"),
    ],
)
def test_configs_that_do_not_fit_are_refused(saved: Path, change: dict[str, Any], message: str) -> None:
    edit_config(saved, **change)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(saved)


def test_the_targets_own_matrices_are_tolerated_and_ignored(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    extra = {"embed_tokens.weight": torch.zeros(199, 64), "lm_head.weight": torch.zeros(199, 64)}
    save_file({**tensors, **extra}, saved / "model.safetensors")
    assert set(load_drafter(saved).state_dict()) == set(RELEASED)
    save_file({**tensors, "surprise.weight": torch.zeros(1)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"surprise.weight is unknown"):
        load_drafter(saved)


def test_broken_files_are_named(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"model.safetensors: not readable"):
        load_drafter(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        load_drafter(saved)


def test_saving_again_replaces(saved: Path) -> None:
    save_drafter(saved, DSparkDrafter(drafter_config(block_size=4)).init_weights(1), {"step": 4})
    assert load_drafter(saved).config.block_size == 4
