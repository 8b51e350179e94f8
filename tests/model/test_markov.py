from __future__ import annotations

import pytest
import torch

from model.markov import build_markov_head
from tests.golden_data import case_names, drafter_config, load_case, max_error


@pytest.mark.parametrize("name", [name for name in case_names() if name.endswith(("conf-none", "conf-markov"))])
def test_logits_are_golden(name: str) -> None:
    case = load_case(name)
    hidden = case.kept(case.common["backbone_hidden"])
    features = case.drafter.head_outputs(hidden, case.blocks.previous_ids).features_AKR
    logits = case.drafter.draft_logits(hidden, features, case.heads)
    mask = case.blocks.supervised
    assert max_error(logits[mask], case.kept(case.logits["draft_logits"])[mask]) < 2e-5


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_steps_one_by_one_equal_whole_blocks(kind: str) -> None:
    torch.manual_seed(0)
    head = build_markov_head(drafter_config(markov_head_type=kind))
    assert head is not None
    embedded, hidden = torch.randn(3, 7, 8), torch.randn(3, 7, 64)
    whole = head.features(embedded, hidden)
    for block in range(3):
        state = None
        for k in range(7):
            features, state = head.step(embedded[block, k], hidden[block, k], state)
            assert torch.allclose(features, whole[block, k], atol=1e-6)


def test_rnn_features_depend_on_earlier_tokens_of_the_block_only() -> None:
    torch.manual_seed(0)
    head = build_markov_head(drafter_config(markov_head_type="rnn"))
    assert head is not None
    embedded, hidden = torch.randn(1, 7, 8), torch.randn(1, 7, 64)
    changed = embedded.clone()
    changed[0, 3] += 1
    differs = (head.features(embedded, hidden) != head.features(changed, hidden)).any(dim=-1)[0]
    assert differs.tolist() == [False] * 3 + [True] * 4


def test_no_head_for_dflash() -> None:
    config = drafter_config(markov_head_type="none", markov_rank=0, confidence_head_with_markov=False)
    assert build_markov_head(config) is None
