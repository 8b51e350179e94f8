"""A drafter that may propose some tokens only: speculation stays lossless, the others come as corrections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.config import DrafterConfig
from model.decoding.chain_drafting import make_drafter
from model.decoding.sampling import warp
from model.decoding.speculative import BatchDecoder, DecodeConfig, DecodeResult, Request
from model.family import new_drafter
from model.target_heads import TargetHeads
from tests.golden_data import drafter_config
from tests.model.decoding.test_speculative import decode_all
from tests.model.test_layouts import eagle3
from tests.tiny_target import TableVerifier

DRAFTED = torch.tensor([0, 2, 3])
# 99.9th percentiles of chi-square: 5 rows of 5 free probabilities have 20 degrees of freedom.
CHI_SQUARE_20 = 45.3


def config_of(kind: str) -> DrafterConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "head_dim": 4,
        "vocab_size": 5,
        "draft_vocab_size": 3,
        "mask_token_id": 4,
        "target_layer_ids": (1,),
        "block_size": 3,
    }
    return eagle3(**sizes) if kind == "eagle3" else drafter_config(markov_head_type=kind, **sizes)


def decode(kind: str, temperature: float) -> tuple[TableVerifier, list[Request], list[DecodeResult]]:
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(5, 5, generator=generator) * 1.2
    drafter = new_drafter(config_of(kind)).init_weights(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(15.0 if parameter.dim() > 1 else 1.0)
    embedding, head = torch.randn(2, 5, 8, generator=generator)
    heads = TargetHeads.from_tensors(embedding, head, draft_ids=DRAFTED)
    verifier = TableVerifier(table, 8)
    settings = DecodeConfig(max_new_tokens=100, temperature=temperature, stop_ids=frozenset(), seed=0)
    requests = [Request([seed % 5, 1], seed=seed) for seed in range(60)]
    decoder = BatchDecoder(verifier, make_drafter(drafter, heads), settings, batch_size=16)
    return verifier, requests, decode_all(decoder, requests)


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "eagle3"])
def test_sampled_output_has_the_targets_distribution(kind: str) -> None:
    verifier, requests, results = decode(kind, 1.0)
    rounds = [r for result in results for r in result.rounds]
    assert {token for r in rounds for token in r.draft_ids} == set(DRAFTED.tolist())
    accepted, proposed = sum(r.accepted for r in rounds), sum(r.proposed for r in rounds)
    assert 0.05 < accepted / proposed < 0.95
    transitions = np.zeros((5, 5))
    for request, result in zip(requests, results, strict=True):
        chain = [*request.prompt_ids[-1:], *result.output_ids]
        np.add.at(transitions, (chain[:-1], chain[1:]), 1)
    assert transitions[:, [1, 4]].sum() > 100  # what cannot be drafted is still generated
    p = warp(verifier.table, DecodeConfig(max_new_tokens=1, temperature=1.0, stop_ids=frozenset(), seed=0).sampling)
    expected = p.double().numpy() * transitions.sum(axis=1, keepdims=True)
    assert ((transitions - expected) ** 2 / expected).sum() < CHI_SQUARE_20


@pytest.mark.parametrize("kind", ["vanilla", "gated", "eagle3"])
def test_greedy_output_is_the_targets_own(kind: str) -> None:
    verifier, requests, results = decode(kind, 0.0)
    best = verifier.table.argmax(dim=-1).tolist()
    for request, result in zip(requests, results, strict=True):
        token = request.prompt_ids[-1]
        for generated in result.output_ids:
            assert generated == best[token]
            token = generated
