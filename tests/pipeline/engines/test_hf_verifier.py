"""The batched target against full forwards and `generate`, for plain, sliding-window and mixed attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model.decoding.speculative import BatchDecoder, DecodeConfig, Request, decode_all
from pipeline.engines.hf_verifier import HfVerifier
from pipeline.errors import ConfigError

VOCAB, LAYERS = 61, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
FAMILIES: dict[str, tuple[type, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=MIXED)),
}
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19], [3, 1, 4, 1, 5]]


def make_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model_class, config = FAMILIES[family]
    return model_class(config).eval()


def full(model: torch.nn.Module, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        output = model(torch.tensor([list(ids)]), output_hidden_states=True)
    return output.logits[0], torch.cat([output.hidden_states[1][0], output.hidden_states[3][0]], dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_read_extended_cropped_and_dropped_equal_full_forwards(family: str) -> None:
    model = make_model(family)
    verifier = HfVerifier(model, [0, 2])
    rows = [list(prompt) for prompt in PROMPTS[:3]]

    def check(reading: Any, rows: list[list[int]], counts: list[int], *, last_only: bool = False) -> None:
        for index, (ids, n) in enumerate(zip(rows, counts, strict=True)):
            logits, hidden = full(model, ids)
            found = reading.logits[index, -1:] if last_only else reading.logits[index, :n]
            torch.testing.assert_close(found, logits[-1:] if last_only else logits[-n:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(reading.hidden[index, :n], hidden[-n:], rtol=1e-4, atol=1e-4)

    check(verifier.add(rows), rows, [len(ids) for ids in rows], last_only=True)
    for step in range(6):
        new = [[(7 * step + row + k) % VOCAB for k in range(1 + (step + row) % 4)] for row in range(len(rows))]
        longer = [[*ids, *more] for ids, more in zip(rows, new, strict=True)]
        check(verifier.extend(new), longer, [len(more) for more in new])
        rows = [ids[: len(ids) - (row + step) % 2] for row, ids in enumerate(longer)]
        verifier.crop([len(ids) for ids in rows])
        if step == 2:  # one leaves, a longer and a shorter one join
            verifier.keep([2, 0])
            joined = [list(PROMPTS[3]), [8] * 30]
            rows = [rows[2], rows[0], *joined]
            check(verifier.add(joined), joined, [5, 30], last_only=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_batched_target_alone_equals_generate(family: str) -> None:
    model = make_model(family)
    config = DecodeConfig(max_new_tokens=20, temperature=0.0, stop_ids=frozenset(), seed=0)
    results = decode_all(
        BatchDecoder(HfVerifier(model, [0]), None, config, batch_size=3), [Request(p) for p in PROMPTS]
    )
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)  # type: ignore[operator]
        assert result.output_ids == ids[0, len(prompt) :].tolist()


def test_layers_that_keep_more_than_keys_and_values_are_refused() -> None:
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(ConfigError, match="qwen3: layers of kind linear_attention"):
        HfVerifier(model, [0])
