"""Incremental drafting of ragged rows against the training forward from scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.anchors import build_blocks
from model.decoding.drafting import BlockDrafter
from model.decoding.sampling import Sampling
from model.drafter import DSparkDrafter
from model.target_heads import TargetHeads
from tests.golden_data import drafter_config, max_error, tiny_heads
from tests.model.decoding.feeder import Feeder

ROUNDS, LENGTH = 20, 200
PLAIN = {"layer_types": (), "sliding_window": None}


def windowed(window: int) -> dict[str, Any]:
    return {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": window}


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("attention", [PLAIN, *(windowed(w) for w in (1, 6, 11, 99))])
def test_drafting_with_caches_equals_full_recomputation_over_twenty_rounds(
    sample_from_anchor: bool, attention: dict
) -> None:
    config = drafter_config(sample_from_anchor=sample_from_anchor, **attention)
    drafter, heads = DSparkDrafter(config).init_weights(1), tiny_heads()
    generator = torch.Generator().manual_seed(2)
    rows = 3
    states = torch.randn(rows, LENGTH, 192, generator=generator)
    ids = torch.randint(0, 199, (rows, LENGTH), generator=generator)
    accepted = torch.randint(1, 9, (ROUNDS, rows), generator=generator).tolist()
    block, feeder = BlockDrafter(drafter, heads), Feeder(states, ids)

    with torch.no_grad():
        block.add(*feeder.next([5, 1, 12]))
        for counts in accepted:
            block.commit(*feeder.next(counts))
            incremental = block.block_states([int(ids[row, feeder.lengths[row]]) for row in range(rows)])
            mask = torch.ones(rows, LENGTH, dtype=torch.bool)
            blocks = build_blocks(ids, mask, [np.array([length]) for length in feeder.lengths], config, None)
            full = drafter.backbone(drafter.project_context(states), blocks, heads)
            assert incremental.shape == (rows, 7, 64)
            assert max_error(incremental, full) < 1e-5


def test_rows_that_leave_and_join_do_not_disturb_the_others() -> None:
    drafter, heads = DSparkDrafter(drafter_config()).init_weights(1), tiny_heads()
    states = torch.randn(4, 30, 192, generator=torch.Generator().manual_seed(0))
    prompts = [list(range(n)) for n in (30, 7, 19, 26)]
    greedy, none = Sampling(temperature=0.0), torch.zeros(1, 7)
    alone = []
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            single = BlockDrafter(drafter, heads)
            single.add(states[row : row + 1], [prompt])
            alone.append(single.propose([5], greedy, none))
        together = BlockDrafter(drafter, heads)
        together.add(states[:3], prompts[:3])
        together.keep([2, 0])
        together.add(states[3:], prompts[3:])
        proposal = together.propose([5, 5, 5], greedy, none)
    for place, row in enumerate([2, 0, 3]):
        assert torch.equal(proposal.token_ids[place], alone[row].token_ids[0])
        assert max_error(proposal.confidences[place], alone[row].confidences[0]) < 1e-5


def test_a_reduced_draft_vocabulary_proposes_target_tokens_and_nothing_else() -> None:
    draft_ids = torch.arange(10, 190, 3)
    config = drafter_config(draft_vocab_size=len(draft_ids))
    drafter, full = DSparkDrafter(config).init_weights(1), tiny_heads()
    heads = TargetHeads.from_tensors(full.embedding_VD, full.lm_head_VD, draft_ids=draft_ids)
    block = BlockDrafter(drafter, heads)
    states = torch.randn(1, 4, 192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.add(states, [[1, 2, 3, 4]])
        greedy = block.propose([5], Sampling(temperature=0.0), torch.zeros(1, 7))
        sampled = block.propose([5], Sampling(temperature=1.0), torch.rand(1, 7))
    allowed = set(draft_ids.tolist())
    assert set(greedy.token_ids.flatten().tolist()) | set(sampled.token_ids.flatten().tolist()) <= allowed
    assert sampled.probabilities is not None
    assert sampled.probabilities.shape == (1, 7, 199)
    assert float(sampled.probabilities[..., draft_ids].sum()) == pytest.approx(7.0, abs=1e-4)


def test_proposals_say_what_they_were_drawn_from() -> None:
    drafter, heads = DSparkDrafter(drafter_config(markov_head_type="rnn")).init_weights(1), tiny_heads()
    block = BlockDrafter(drafter, heads)
    assert (block.block_size, block.captured_width, block.has_confidence) == (7, 192, True)
    states = torch.randn(1, 4, 192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.add(states, [[1, 2, 3, 4]])
        sampled = block.propose([5], Sampling(temperature=0.7, top_k=2), torch.rand(1, 7))
    assert sampled.probabilities is not None
    drawn = sampled.probabilities.gather(2, sampled.token_ids[..., None])
    assert bool((drawn > 0).all())
    assert bool(((sampled.probabilities > 0).sum(-1) == 2).all())
