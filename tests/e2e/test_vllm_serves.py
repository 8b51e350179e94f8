"""vLLM's own classes load what is exported here, run it on a CPU, and draft the same tokens as our own loop.

Every kind and layout that vLLM supports, and the two heads that it does not. One vLLM process for each.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import DrafterConfig, DrafterShape
from model.decoding.chain_drafting import make_drafter
from model.decoding.sampling import Sampling
from model.export import load_drafter, save_drafter
from model.family import new_drafter
from model.serving import VLLM_TARGETS, serving_warnings
from model.target_families import FAMILIES
from model.target_heads import TargetHeads, load_target_heads
from pipeline.config import TargetSection
from pipeline.engines.hf import LayerTap, load_target
from tests.e2e.vllm_probe import MARK
from tests.pipeline.hf_target import VOCAB, save_tiny_target

PROMPTS = ([5, 6, 7, 8], [100, 200, 300])
MAX_TOKENS, GAMMA, LAYERS = 12, 4, (0, 2)
NO_HEADS = {
    "markov_head_type": "none",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "vanilla, 300 of 1024 tokens": {"draft_vocab_size": 300},
    "vanilla, anchor slot silent": {"sample_from_anchor": False},
    "vanilla, sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
    "no head": NO_HEADS,
    "dflash": {"kind": "dflash", "sample_from_anchor": False, **NO_HEADS},
    "dflash, anchor first": {"kind": "dflash", **NO_HEADS},
    "eagle3": {"kind": "eagle3", "num_draft_layers": 1, **NO_HEADS},
    "eagle3, 300 of 1024 tokens": {"kind": "eagle3", "num_draft_layers": 1, "draft_vocab_size": 300, **NO_HEADS},
}
TARGETS = {"vanilla on a Llama": "llama", "vanilla on a tied Qwen2": "qwen2"}


@dataclass(frozen=True)
class Served:
    """An exported drafter and the target that it goes with."""

    target: Path
    drafter: Path
    heads: TargetHeads


def export(folder: Path, changes: dict[str, Any], family: str = "qwen3") -> Served:
    # vLLM takes a Qwen2's head_dim from its hidden size alone.
    special = {"tie_word_embeddings": True, "hidden_size": 4 * 32} if family == "qwen2" else {}
    target = save_tiny_target(folder / "target", family=family, head_dim=32, **special)
    shape: dict[str, Any] = {
        "target_layer_ids": LAYERS,
        "mask_token_id": 3,
        "block_size": GAMMA,
        "num_draft_layers": 2,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    config = DrafterConfig.from_target(
        json.loads((target / "config.json").read_text()), shape=DrafterShape(**{**shape, **changes})
    )
    drafter = new_drafter(config).init_weights(1)
    with torch.no_grad():  # far from the tiny initial values, so that every part decides about the drafts
        for name, parameter in drafter.named_parameters():
            parameter.mul_(1.5 if parameter.dim() == 1 else 40.0 if "markov" in name else 8.0)
    if config.reduces_vocabulary:
        generator = torch.Generator().manual_seed(2)
        drafter.draft_ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
    heads = load_target_heads(target, dtype=None, draft_ids=drafter.draft_ids)
    return Served(target, save_drafter(folder / "drafter", drafter, {}, heads=heads), heads)


def run_vllm(served: Served, method: str) -> subprocess.CompletedProcess[str]:
    request = {
        "target": str(served.target),
        "speculative": {"method": method, "model": str(served.drafter), "num_speculative_tokens": GAMMA},
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
    }
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": str(here / "interpreter"),
        "TRITON_INTERPRET": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return subprocess.run(
        [sys.executable, str(here / "vllm_probe.py"), json.dumps(request)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def replay(tokens: list[int], prompt_length: int, blocks: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """(anchor position, drafts) of every round: greedy verification accepts exactly the drafts that came out."""
    position = prompt_length
    for block in blocks:
        if position >= len(tokens):
            return
        yield position, block
        accepted = 0
        following = tokens[position + 1 :]
        while accepted < min(len(block), len(following)) and block[accepted] == following[accepted]:
            accepted += 1
        position += accepted + 1


def states_of(served: Served, tokens: list[int]) -> tuple[Tensor, list[int]]:
    """Captured states [T, C] of the target through transformers, and its greedy token after every position."""
    model: Any = load_target(TargetSection(path=str(served.target), dtype="float32"), "cpu")
    tap = LayerTap(model.get_decoder(), LAYERS)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.cat(tap.take(), dim=-1)[0].clone(), logits.argmax(-1).tolist()


@torch.no_grad()
def our_drafts(served: Served, tokens: list[int], states_TC: Tensor, anchor: int) -> list[int]:
    drafting = make_drafter(load_drafter(served.drafter), served.heads)
    drafting.add(states_TC[None, :anchor], [tokens[:anchor]])
    proposal = drafting.propose([tokens[anchor]], Sampling(temperature=0.0), torch.zeros(1, GAMMA))
    return proposal.token_ids[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *TARGETS])
def test_vllm_drafts_what_we_draft(case: str, tmp_path: Path) -> None:
    served = export(tmp_path, CASES.get(case, {}), TARGETS.get(case, "qwen3"))
    config = load_drafter(served.drafter).config
    warnings = serving_warnings(config, target_family=TARGETS.get(case, "qwen3"), scales_embedding=False)
    assert not any(warning.blocks and warning.engine == "vllm" for warning in warnings)
    method = {"dflash": "dflash", "eagle3": "eagle3"}.get(case.split(",", maxsplit=1)[0], "dspark")
    if case == "dflash, anchor first":
        method = "dspark"
    finished = run_vllm(served, method)
    lines = [line for line in finished.stdout.splitlines() if line.startswith(MARK)]
    assert lines, finished.stdout[-3000:] + finished.stderr[-6000:]
    seen = json.loads(lines[0].removeprefix(MARK))
    assert (seen["method"], seen["num_speculative_tokens"]) == (method, GAMMA)
    rounds = 0
    for prompt, run in zip(PROMPTS, seen["runs"], strict=True):
        tokens = [*prompt, *run["output"]]
        states, greedy = states_of(served, tokens)
        assert run["output"] == greedy[len(prompt) - 1 : -1]  # speculation changed nothing
        for position, block in replay(tokens, len(prompt), run["blocks"]):
            assert block == our_drafts(served, tokens, states, position), (position, block)
            rounds += 1
    assert rounds >= 2 * MAX_TOKENS / (GAMMA + 1)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_vllm_refuses_what_we_say_it_refuses(head: str, tmp_path: Path) -> None:
    served = export(tmp_path, {"markov_head_type": head})
    warnings = serving_warnings(load_drafter(served.drafter).config, target_family="qwen3", scales_embedding=False)
    assert any(warning.blocks and warning.engine == "vllm" for warning in warnings)
    finished = run_vllm(served, "dspark")
    assert finished.returncode != 0
    assert "markov_head" in finished.stdout + finished.stderr


@pytest.mark.slow
def test_the_targets_that_vllm_captures_layers_of_are_those_we_name() -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    names = {
        "llama": ("llama", "LlamaForCausalLM"),
        "mistral": ("mistral", "MistralForCausalLM"),
        "qwen2": ("qwen2", "Qwen2ForCausalLM"),
        "qwen3": ("qwen3", "Qwen3ForCausalLM"),
        "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
        "gemma": ("gemma", "GemmaForCausalLM"),
        "gemma2": ("gemma2", "Gemma2ForCausalLM"),
        "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    }
    assert names.keys() == FAMILIES.keys()
    found = set()
    for family, (module, name) in names.items():
        model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
        if supports_eagle3(model):
            found.add(family)
    assert found == VLLM_TARGETS
