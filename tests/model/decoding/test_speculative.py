"""The draft-verify loop against the golden runs, and its losslessness."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from model.decoding.speculative import DecodeConfig, DecodeResult, speculative_decode, target_decode
from model.drafter import DSparkDrafter
from model.errors import DecodingError
from model.target_heads import TargetHeads
from pipeline.engines.hf import HfVerifier
from tests.golden_data import drafter_config, read_json, split_state, tensors, tiny_heads
from tests.tiny_target import TableVerifier, tiny_verifier

GOLDEN_DECODE = read_json("decode/decode.json")
RUNS = {run["name"]: run for run in GOLDEN_DECODE["runs"]}


@pytest.fixture(scope="module")
def verifier() -> HfVerifier:
    return tiny_verifier()


def load_run(run: dict[str, Any]) -> tuple[DSparkDrafter, TargetHeads]:
    state = tensors(*run["state_files"])
    width = state["confidence_head.proj.weight"].shape[1] if "confidence_head.proj.weight" in state else 0
    config = drafter_config(
        block_size=run["block_size"],
        markov_head_type=run["markov_head_type"],
        markov_rank=0 if run["markov_head_type"] == "none" else 8,
        enable_confidence_head=width > 0,
        confidence_head_with_markov=width == 72,
    )
    return split_state(state, config)


def greedy(**overrides: Any) -> DecodeConfig:
    settings = {"max_new_tokens": 64, "temperature": 0.0, "stop_ids": frozenset(), "seed": 0}
    return DecodeConfig(**{**settings, **overrides})


@pytest.mark.parametrize("name", RUNS)
def test_golden_run(name: str, verifier: HfVerifier) -> None:
    run = RUNS[name]
    drafter, heads = load_run(run)
    prompt = GOLDEN_DECODE["prompts"][run["prompt"]]
    config = greedy(
        # The reference stops only when MORE than max_new_tokens exist, and cuts the output afterwards.
        max_new_tokens=run["max_new_tokens"] + 1,
        stop_ids=frozenset(run["stop_token_ids"] or ()),
        confidence_threshold=run["confidence_threshold"],
    )
    result = speculative_decode(verifier, drafter, heads, prompt, config)
    assert prompt + result.output_ids[: run["max_new_tokens"]] == run["output_ids"]
    assert [r.emitted for r in result.rounds] == run["acceptance_lengths"]
    assert [r.proposed for r in result.rounds] == run["proposal_lengths"]
    assert [r.accepted for r in result.rounds] == run["accepted_draft_lengths"]
    for ours, golden in zip(result.rounds, run["rounds"], strict=True):
        assert list(ours.draft_ids) == golden["draft_tokens"]
        if golden["confidence_logits"]:
            expected = torch.tensor(golden["confidence_logits"]).sigmoid().tolist()
            assert ours.confidences == pytest.approx(expected, abs=2e-5)
    assert result.accepted_length == pytest.approx(np.mean(run["acceptance_lengths"]))


def test_raw_rounds_are_golden(verifier: HfVerifier) -> None:
    raw = tensors("decode/raw_rounds")
    for name in {key.split(".round")[0] for key in raw}:
        run = RUNS[name]
        drafter, heads = load_run(run)
        prompt = GOLDEN_DECODE["prompts"][run["prompt"]]
        with torch.no_grad():
            _, states = verifier.start(prompt)
            cache = drafter.new_cache()
            drafter.append_context(cache, states)
            hidden = drafter.draft_block(cache, run["rounds"][0]["anchor_token"], heads)
        assert torch.allclose(hidden, raw[f"{name}.round0.block_hidden"], atol=2e-5)
        assert torch.allclose(heads.logits(hidden), raw[f"{name}.round0.base_logits"], atol=2e-5)
        previous = torch.tensor([run["rounds"][0]["anchor_token"], *run["rounds"][0]["draft_tokens"][:-1]])
        features = drafter.head_outputs(hidden[None], previous[None]).features_AKR
        logits = drafter.draft_logits(hidden[None], features, heads)[0]
        assert torch.allclose(logits, raw[f"{name}.round0.draft_logits"], atol=2e-5)


@pytest.mark.parametrize("markov_head_type", ["vanilla", "rnn"])
def test_greedy_output_is_the_targets_own_for_random_drafters(markov_head_type: str, verifier: HfVerifier) -> None:
    rng = np.random.default_rng(1)
    heads = tiny_heads()
    for index in range(50):
        sizes: dict[str, Any] = {"block_size": 1 + index % 9, "sample_from_anchor": index % 3 != 0}
        drafter = DSparkDrafter(drafter_config(markov_head_type=markov_head_type, **sizes)).init_weights(index)
        prompt = rng.integers(0, 199, size=rng.integers(1, 20)).tolist()
        stop_ids = frozenset(rng.integers(0, 199, size=2).tolist())
        config = greedy(max_new_tokens=12, stop_ids=stop_ids, confidence_threshold=0.45 * (index % 2))
        expected = target_decode(verifier, prompt, config).output_ids
        assert speculative_decode(verifier, drafter, heads, prompt, config).output_ids == expected


def toy(block_size: int, *, seed: int) -> tuple[TableVerifier, DSparkDrafter, TargetHeads]:
    """Five tokens; a drafter that is neither useless nor perfect, with confidences that vary."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(5, 5, generator=generator) * 1.2
    config = drafter_config(
        hidden_size=8, head_dim=4, vocab_size=5, mask_token_id=4, target_layer_ids=(1,), block_size=block_size
    )
    drafter = DSparkDrafter(config).init_weights(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(15.0 if parameter.dim() > 1 else 1.0)
    heads = TargetHeads.from_tensors(torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator))
    return TableVerifier(table, 8), drafter, heads


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_sampled_output_has_the_targets_distribution(threshold: float) -> None:
    verifier, drafter, heads = toy(3, seed=7)
    transitions = np.zeros((5, 5))
    rounds = accepted = proposed = 0
    for seed in range(40):
        config = DecodeConfig(
            max_new_tokens=100, temperature=1.0, stop_ids=frozenset(), seed=seed, confidence_threshold=threshold
        )
        result = speculative_decode(verifier, drafter, heads, [seed % 5], config)
        chain = [seed % 5, *result.output_ids]
        np.add.at(transitions, (chain[:-1], chain[1:]), 1)
        rounds += len(result.rounds)
        accepted += sum(r.accepted for r in result.rounds)
        proposed += sum(r.proposed for r in result.rounds)
    assert 0.05 < accepted / proposed < 0.95, "the test must see accepted and rejected drafts"
    if threshold:
        assert proposed < 3 * rounds, "the threshold must hold something back"
    expected = torch.softmax(verifier.table, dim=-1).double().numpy() * transitions.sum(axis=1, keepdims=True)
    chi_square = ((transitions - expected) ** 2 / expected).sum()
    assert chi_square < 45.3  # the 99.9 % quantile with 5 * 4 degrees of freedom


def test_seed_decides_a_sampled_run() -> None:
    verifier, drafter, heads = toy(3, seed=7)

    def run(seed: int) -> DecodeResult:
        config = DecodeConfig(max_new_tokens=40, temperature=1.0, stop_ids=frozenset(), seed=seed)
        return speculative_decode(verifier, drafter, heads, [1], config)

    assert run(3).output_ids == run(3).output_ids
    assert run(3).output_ids != run(4).output_ids


def test_verifier_and_draft_cache_stay_in_step() -> None:
    verifier, drafter, heads = toy(4, seed=3)
    config = DecodeConfig(max_new_tokens=50, temperature=0.7, stop_ids=frozenset(), seed=1)
    result = speculative_decode(verifier, drafter, heads, [1, 2, 3], config)
    positions = [r.position for r in result.rounds]
    assert positions[0] == 3
    assert [b - a for a, b in itertools.pairwise(positions)] == [r.emitted for r in result.rounds[:-1]]
    # The target has read everything that was accepted, and not the last bonus token.
    assert len(verifier.ids) == positions[-1] + result.rounds[-1].emitted


def test_stop_token_from_prefill_needs_no_round() -> None:
    verifier, drafter, heads = toy(3, seed=7)
    first = int(verifier.table[2].argmax())
    result = speculative_decode(verifier, drafter, heads, [2], greedy(stop_ids=frozenset([first])))
    assert result.output_ids == [first]
    assert result.rounds == []
    assert result.seconds_per_token == 0.0


def test_errors_name_what_is_wrong() -> None:
    verifier, drafter, heads = toy(3, seed=7)
    with pytest.raises(DecodingError, match="max_new_tokens 0"):
        greedy(max_new_tokens=0)
    with pytest.raises(DecodingError, match="width 9, the drafter reads 8"):
        speculative_decode(TableVerifier(verifier.table, 9), drafter, heads, [1], greedy())
    plain = DSparkDrafter(drafter_config(enable_confidence_head=False, confidence_head_with_markov=False))
    with pytest.raises(DecodingError, match="needs a drafter with a confidence head"):
        speculative_decode(verifier, plain, heads, [1], greedy(confidence_threshold=0.5))
