"""One drafter class on every target family: speculation leaves the target's own greedy output alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model.config import DrafterConfig
from model.decoding.chain_drafting import make_drafter
from model.decoding.speculative import BatchDecoder, DecodeConfig, Request
from model.drafter import DSparkDrafter
from model.target_heads import load_target_heads
from pipeline.config import TargetSection
from pipeline.engines.hf import load_target
from pipeline.engines.hf_verifier import HfVerifier
from tests.model.decoding.test_speculative import decode_all
from tests.model.test_config import shape
from tests.pipeline.hf_target import FAMILIES, save_tiny_target

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family: str, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path, family=family)
    facts = json.loads((folder / "config.json").read_text())
    config = DrafterConfig.from_target(facts, shape=shape(target_layer_ids=(-1, 0, 2), mask_token_id=3, block_size=4))
    heads = load_target_heads(folder, dtype=torch.float32)
    model = load_target(TargetSection(path=str(folder), dtype="float32"), "cpu")
    settings = DecodeConfig(max_new_tokens=16, temperature=0.0, stop_ids=frozenset(), seed=0)
    outputs = []
    for drafter in (make_drafter(DSparkDrafter(config).init_weights(0), heads), None):
        decoder = BatchDecoder(HfVerifier(model, config.target_layer_ids), drafter, settings, batch_size=3)
        outputs.append([result.output_ids for result in decode_all(decoder, [Request(ids) for ids in PROMPTS])])
    assert outputs[0] == outputs[1]
    for prompt, answer in zip(PROMPTS, outputs[0], strict=True):
        with torch.inference_mode():
            greedy = model(torch.tensor([[*prompt, *answer]])).logits[0].argmax(-1).tolist()
        assert answer == greedy[len(prompt) - 1 : -1]
