from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from model.config import DrafterConfig
from model.serving import ServingWarning, serve_commands, serving_warnings
from tests.golden_data import drafter_config
from tests.model.test_layouts import NO_HEADS, dflash, eagle3


def warnings(config: DrafterConfig, family: str = "qwen3", *, scales: bool = False) -> list[ServingWarning]:
    return serving_warnings(config, target_family=family, scales_embedding=scales)


def blockers(config: DrafterConfig, family: str = "qwen3", *, scales: bool = False) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for warning in warnings(config, family, scales=scales):
        if warning.blocks:
            found.setdefault(warning.engine, []).append(warning.text)
    return found


@pytest.mark.parametrize(
    "config", [drafter_config(), dflash(), dflash(sample_from_anchor=True), drafter_config(**NO_HEADS)]
)
def test_what_both_engines_serve(config: DrafterConfig) -> None:
    assert blockers(config) == {}


@pytest.mark.parametrize(
    ("changes", "family", "engine", "text"),
    [
        ({"markov_head_type": "gated"}, "qwen3", "vllm", "knows no gated head"),
        ({"markov_head_type": "rnn"}, "qwen3", "vllm", "train drafter.markov_head=vanilla"),
        ({}, "gemma2", "vllm", "captures no layers of a gemma2 target"),
        ({"sample_from_anchor": False}, "qwen3", "sglang", "anchor-first"),
        ({"target_layer_ids": (-1, 2)}, "qwen3", "sglang", "-1"),
        ({"draft_vocab_size": 50}, "llama", "sglang", "reduced vocabulary"),
    ],
)
def test_what_one_of_them_does_not(changes: dict[str, Any], family: str, engine: str, text: str) -> None:
    found = blockers(drafter_config(**changes), family)
    assert list(found) == [engine]
    assert text in found[engine][0]


def test_gemma_and_eagle3() -> None:
    assert set(blockers(drafter_config(), "gemma3_text", scales=True)) == {"vllm", "sglang"}
    assert set(blockers(eagle3())) == {"sglang"}


def test_what_is_carried_but_not_used_is_said_and_blockers_come_first() -> None:
    found = warnings(drafter_config(markov_head_type="gated"))
    assert [warning.blocks for warning in found] == sorted((warning.blocks for warning in found), reverse=True)
    assert found[0].line().startswith("vllm: cannot serve it: ")
    assert any("enable_adaptive_verification" in warning.text for warning in found if not warning.blocks)
    assert any("zeros" in warning.text for warning in warnings(dflash(sample_from_anchor=True)))
    assert not any("zeros" in warning.text for warning in warnings(dflash()))


@pytest.mark.parametrize(
    ("config", "method"), [(drafter_config(block_size=5), "dspark"), (dflash(block_size=5), "dflash")]
)
def test_command_lines_name_the_method_and_gamma(config: DrafterConfig, method: str) -> None:
    commands = serve_commands(config, target="T", drafter="D")
    words = shlex.split(commands["vllm"])
    assert words[:3] == ["vllm", "serve", "T"]
    assert json.loads(words[-1]) == {"method": method, "model": "D", "num_speculative_tokens": 5}
    words = shlex.split(commands["sglang"])
    assert words[words.index("--speculative-algorithm") + 1] == method.upper()
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "6"
