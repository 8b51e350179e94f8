"""Every supported family: what is read by key equals what transformers computes, on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.errors import UnsupportedTarget
from model.target_families import FAMILIES, head_facts
from model.target_heads import load_final_norm, load_target_heads
from pipeline.config import TargetSection
from pipeline.engines.hf import LayerTap, load_target
from tests.pipeline.hf_target import FAMILIES as TINY
from tests.pipeline.hf_target import HIDDEN, LAYERS, TIED, VOCAB, save_tiny_target

IDS = torch.arange(0, VOCAB, 17)[None]


@pytest.fixture(scope="module", params=TINY)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp(request.param), family=request.param)


def observe(folder: Path, dtype: str) -> dict[str, Tensor]:
    """What the whole model does with IDS around its embedding, final norm and head."""
    model: Any = load_target(TargetSection(path=str(folder), dtype=dtype), "cpu")  # type: ignore[arg-type]
    tap = LayerTap(model.get_decoder(), [-1, LAYERS - 1])
    with torch.inference_mode():
        last = model.get_decoder()(input_ids=IDS, use_cache=False).last_hidden_state
        embedded, raw = tap.take()
        logits = model(input_ids=IDS, use_cache=False).logits
    return {"embedded": embedded, "raw": raw, "last": last, "logits": logits}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_norm_and_logits_are_the_targets_own(target: Path, dtype: str) -> None:
    seen = observe(target, dtype)
    torch_dtype = getattr(torch, dtype)
    heads, norm = load_target_heads(target, dtype=torch_dtype), load_final_norm(target, dtype=torch_dtype)
    assert torch.equal(heads.embed(IDS), seen["embedded"])
    assert torch.equal(norm(seen["raw"]), seen["last"])
    torch.testing.assert_close(heads.logits(seen["last"]), seen["logits"], rtol=1e-6, atol=1e-6)
    # The check can fail: neither the raw table nor the raw matrix nor the un-normed state would pass for Gemma.
    assert torch.equal(heads.embedding_VD[IDS], seen["embedded"]) == ("gemma" not in target.name)
    capped = not torch.equal(heads.draft_logits(seen["last"]), seen["logits"])
    assert capped == any(name in target.name for name in ("gemma2", "gemma3_text"))
    assert not torch.allclose(seen["raw"].float(), seen["last"].float(), atol=0.1)


def test_tied_and_nested_configs_are_understood(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    facts = head_facts(config, source="here")
    assert (facts.hidden_size, facts.vocab_size) == (HIDDEN, VOCAB)
    assert facts.tied == any(target.name.startswith(name) for name in TIED)
    assert load_target_heads(target, dtype=None).tied == facts.tied
    # Released Gemma configs leave the flag out: the family's own default holds.
    if "text_config" not in config:
        config.pop("tie_word_embeddings", None)
        assert head_facts(config, source="here").tied == FAMILIES[facts.model_type].tied_by_default


def test_the_outer_flag_of_a_nested_config_decides() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 8, "vocab_size": 9, "rms_norm_eps": 1e-6}
    assert head_facts({"text_config": text}, source="").tied
    assert not head_facts({"text_config": text, "tie_word_embeddings": False}, source="").tied
    assert not head_facts({"text_config": {**text, "tie_word_embeddings": False}}, source="").tied


def test_the_embedding_scale_is_rounded_before_it_multiplies(tmp_path: Path) -> None:
    # √80 = 8.944 is 8.9375 in bf16: scaling in float32 and rounding the product gives other bits.
    folder = save_tiny_target(tmp_path, family="gemma", hidden_size=80)
    heads = load_target_heads(folder, dtype=torch.bfloat16)
    embedded = observe(folder, "bfloat16")["embedded"]
    assert torch.equal(heads.embed(IDS), embedded)
    assert not torch.equal((heads.embedding_VD[IDS].float() * 80**0.5).bfloat16(), embedded)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "cohere2"},
            r"model_type 'cohere2' is not a supported target family; supported: llama,",
        ),
        ({"text_config": {"model_type": "gemma4_text"}}, "'gemma4_text' is not a supported"),
        ({}, "'None' is not a supported"),
        ({"model_type": "llama", "logits_scaling": 8.0}, r"logits_scaling 8.0 in a llama target"),
        ({"model_type": "llama", "final_logit_softcapping": 30.0}, r"final_logit_softcapping 30.0 in a llama target"),
        (
            {"text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 30.0}},
            r"final_logit_softcapping 30.0 in a gemma3_text target",
        ),
        ({"model_type": "qwen3", "hidden_size": 8}, "here: no vocab_size, rms_norm_eps"),
    ],
)
def test_unsupported_targets_are_named_with_what_is_supported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedTarget, match=message):
        head_facts(config, source="here")
