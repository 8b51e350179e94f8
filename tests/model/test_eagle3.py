"""The EAGLE-3 drafter against the golden case."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from model.anchors import build_blocks
from model.eagle3 import Eagle3Drafter
from model.errors import AnchorError
from tests.golden_data import max_error, tensors
from tests.golden_eagle3 import STEPS, eagle3_config, load_eagle3


def test_every_step_is_golden() -> None:
    case = load_eagle3()
    blocks = case.inputs.blocks
    assert case.inputs.input_ids_BT is not None
    features = case.drafter.unroll(case.inputs.hidden_states_BTC, case.inputs.input_ids_BT, blocks, case.heads)
    logits = case.heads.draft_logits(case.drafter.norm(features))
    for step in range(STEPS):
        assert torch.equal(case.at_blocks("input_ids", step), blocks.previous_ids[:, step])
        # Elsewhere values mean nothing: beyond the end the reference attends to nothing at all.
        chosen = blocks.supervised[:, step]
        assert max_error(logits[chosen, step], case.at_blocks("draft_logits", step)[chosen]) < 2e-5
        wanted = case.at_blocks("hidden_states", step)[chosen]
        assert max_error(features[:, step][chosen], wanted) < 1e-5 * float(wanted.abs().max())


def random_case(length: int, seed: int) -> tuple[Eagle3Drafter, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(eagle3_config(block_size=5)).double().init_weights(seed)
    hidden = torch.randn(1, length, 320, generator=generator, dtype=torch.float64)
    return drafter, hidden, torch.randint(0, 199, (1, length), generator=generator)


def test_a_change_at_or_after_an_anchor_never_changes_its_block() -> None:
    drafter, hidden, ids = random_case(20, 2)
    heads, mask = load_eagle3().heads.double(), torch.ones(1, 20, dtype=torch.bool)
    anchors = np.array([3, 9, 10, 14])
    blocks = build_blocks(ids, mask, [anchors], drafter.config, None)
    expected = drafter.unroll(hidden, ids, blocks, heads)
    for column in range(15):
        changed = hidden.clone()
        changed[:, column] += 10.0
        out = drafter.unroll(changed, ids, blocks, heads)
        assert [bool(torch.equal(out[i], expected[i])) for i in range(4)] == [column >= a for a in anchors]


def test_a_block_without_context_is_refused() -> None:
    drafter, hidden, ids = random_case(9, 3)
    heads, mask = load_eagle3().heads.double(), torch.ones(1, 9, dtype=torch.bool)
    blocks = build_blocks(ids, mask, [np.array([0, 4])], drafter.config, None)
    with pytest.raises(AnchorError, match="no feature before"):
        drafter.unroll(hidden, ids, blocks, heads)


def test_garbage_beyond_the_context_is_never_read() -> None:
    case = load_eagle3()
    ids, hidden = tensors("inputs")["input_ids"], case.inputs.hidden_states_BTC.clone()
    blocks = case.inputs.blocks
    short = dataclasses.replace(
        blocks, **{f.name: getattr(blocks, f.name)[blocks.rows == 1] for f in dataclasses.fields(blocks)
                   if f.name != "draftable_tokens"}
    )  # fmt: skip
    expected = case.drafter.unroll(hidden, ids, short, case.heads)
    last = int(short.anchors.max())
    hidden[:, last:], hidden[0] = torch.nan, torch.nan
    spoiled = ids.clone()
    spoiled[:, last + 1 :], spoiled[0] = -1, 199
    assert torch.equal(expected, case.drafter.unroll(hidden, spoiled, short, case.heads))
