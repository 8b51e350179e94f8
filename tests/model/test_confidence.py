from __future__ import annotations

import pytest
import torch

from model.confidence import ConfidenceHead
from tests.golden_data import case_names, drafter_config, load_case, max_error


@pytest.mark.parametrize("name", [name for name in case_names() if "conf-plain" in name or "conf-markov" in name])
def test_confidence_logits_are_golden(name: str) -> None:
    case = load_case(name)
    assert case.confidence_pred is not None
    hidden = case.kept(case.common["backbone_hidden"])
    logits = case.drafter.head_outputs(hidden, case.blocks.previous_ids).confidence_AK
    assert logits is not None
    mask = case.blocks.supervised
    assert max_error(logits[mask], case.kept(case.confidence_pred)[mask]) < 2e-5


def test_plain_head_ignores_the_previous_token() -> None:
    hidden, embedded = torch.randn(2, 64), torch.randn(2, 8)
    plain = ConfidenceHead(drafter_config(confidence_head_with_markov=False))
    assert torch.equal(plain(hidden, embedded), plain(hidden, None))
    informed = ConfidenceHead(drafter_config())
    assert not torch.equal(informed(hidden, embedded), informed(hidden, embedded + 1))
