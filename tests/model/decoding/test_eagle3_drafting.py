"""EAGLE-3 drafting of ragged rows against the unrolled training pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from model.anchors import build_blocks
from model.decoding.eagle3_drafting import Eagle3Rows
from model.decoding.sampling import Sampling
from model.eagle3 import Eagle3Drafter
from model.target_heads import TargetHeads
from tests.golden_data import max_error
from tests.golden_eagle3 import eagle3_config, load_eagle3

LENGTH, STEPS = 60, 5
GREEDY = Sampling(temperature=0.0)
NONE = torch.zeros(1, STEPS)


def random_case(rows: int) -> tuple[Eagle3Drafter, TargetHeads, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drafter = Eagle3Drafter(eagle3_config(block_size=STEPS)).double().init_weights(1)
    hidden = torch.randn(rows, LENGTH, 320, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 199, (rows, LENGTH), generator=generator)
    return drafter, load_eagle3().heads.double(), hidden, ids


def pieces(hidden: Tensor, ids: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, list[list[int]]]:
    """Positions first..end-1 of every row; padding is NaN, which must not spread."""
    padded = torch.full((len(spans), max(end - first for first, end in spans), hidden.shape[-1]), torch.nan).double()
    for row, (first, end) in enumerate(spans):
        padded[row, : end - first] = hidden[row, first:end]
    return padded, [ids[row, first:end].tolist() for row, (first, end) in enumerate(spans)]


@torch.no_grad()
def test_drafting_with_caches_equals_the_training_pass_over_many_rounds() -> None:
    """E18, for rows of unequal growth: what the steps say when they are fed the drafts that they just made."""
    rows = 3
    drafter, heads, hidden, ids = random_case(rows)
    decoder, lengths = Eagle3Rows(drafter, heads), [4, 1, 9]
    decoder.add(*pieces(hidden, ids, [(0, n) for n in lengths]))
    rng = np.random.default_rng(0)
    for round_number in range(12):
        if round_number:
            grown = [length + int(rng.integers(1, 5)) for length in lengths]
            decoder.commit(*pieces(hidden, ids, list(zip(lengths, grown, strict=True))))
            lengths = grown
        anchors = [int(ids[row, lengths[row]]) for row in range(rows)]
        drafts = decoder.propose(anchors, GREEDY, NONE.expand(rows, STEPS)).token_ids
        assert torch.equal(drafts, decoder.propose(anchors, GREEDY, NONE.expand(rows, STEPS)).token_ids)
        # The same context followed by the drafts, as one training sequence with an anchor there.
        followed = ids.clone()
        for row, length in enumerate(lengths):
            followed[row, length + 1 : length + 1 + STEPS] = drafts[row, : LENGTH - length - 1]
        blocks = build_blocks(
            followed, torch.ones(rows, LENGTH, dtype=torch.bool), [np.array([n]) for n in lengths], drafter.config, None
        )
        logits = heads.draft_logits(drafter.norm(drafter.unroll(hidden, followed, blocks, heads)))
        assert torch.equal(logits.argmax(-1), drafts)


@torch.no_grad()
def test_steps_equal_the_unrolled_features() -> None:
    drafter, heads, hidden, ids = random_case(2)
    decoder, lengths = Eagle3Rows(drafter, heads), [7, 12]
    decoder.add(*pieces(hidden, ids, [(0, n) for n in lengths]))
    blocks = build_blocks(
        ids, torch.ones(2, LENGTH, dtype=torch.bool), [np.array([n]) for n in lengths], drafter.config, None
    )
    expected = drafter.unroll(hidden, ids, blocks, heads)
    feature = decoder._waiting_BD
    for k in range(STEPS):
        feature = decoder.step(ids[torch.arange(2), torch.tensor(lengths) + k], feature)
        decoder._cache.lengths = [length + 1 for length in decoder._cache.lengths]
        assert max_error(feature, expected[:, k]) < 1e-6  # norms and rotations are float32


@torch.no_grad()
def test_rows_that_leave_and_join_do_not_disturb_the_others() -> None:
    drafter, heads, hidden, ids = random_case(4)
    lengths = [30, 1, 19, 26]

    def alone(row: int) -> Tensor:
        one = Eagle3Rows(drafter, heads)
        one.add(hidden[row : row + 1, : lengths[row]], [ids[row, : lengths[row]].tolist()])
        return one.propose([5], GREEDY, NONE).token_ids[0]

    decoder = Eagle3Rows(drafter, heads)
    for row in range(3):
        decoder.add(hidden[row : row + 1, : lengths[row]], [ids[row, : lengths[row]].tolist()])
    decoder.keep([2, 0])
    decoder.add(hidden[3:, : lengths[3]], [ids[3, : lengths[3]].tolist()])
    found = decoder.propose([5] * 3, GREEDY, NONE.expand(3, STEPS)).token_ids
    assert torch.equal(found, torch.stack([alone(2), alone(0), alone(3)]))


@torch.no_grad()
def test_sampled_drafts_come_with_what_they_were_drawn_from() -> None:
    drafter, heads, hidden, ids = random_case(1)
    decoder = Eagle3Rows(drafter, heads)
    decoder.add(hidden[:, :9], [ids[0, :9].tolist()])
    low, high = (decoder.propose([3], Sampling(temperature=1.0), torch.full((1, STEPS), u)) for u in (0.0, 1.0 - 1e-7))
    assert low.probabilities is not None
    assert low.probabilities.shape == (1, STEPS, 199)
    assert low.probabilities.sum(-1) == pytest.approx(np.ones((1, STEPS)), abs=1e-5)
    assert (low.token_ids[0, 0], high.token_ids[0, 0]) == (0, 198)
    assert low.confidences is None
    assert not decoder.has_confidence
