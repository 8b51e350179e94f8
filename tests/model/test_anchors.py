from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.anchors import block_weight_sum, build_blocks, draw_anchors, legal_anchors
from model.config import DrafterConfig
from model.errors import AnchorError
from tests.golden_data import drafter_config, golden_anchors, golden_blocks, load_case, max_error, tensors

MASKS = st.lists(st.booleans(), min_size=1, max_size=60).map(lambda bits: np.array(bits, dtype=bool))


@pytest.mark.parametrize("name", ["b7_vanilla_conf-markov", "b4_vanilla_conf-markov"])
def test_labels_masks_weights_and_positions_are_golden(name: str) -> None:
    case = load_case(name)
    blocks, mask = case.blocks, case.kept(case.common["eval_mask"])
    assert torch.equal(blocks.supervised, mask)
    assert torch.equal(blocks.labels[mask], case.kept(case.common["target_ids"])[mask])
    assert max_error(blocks.weights, case.kept(case.common["loss_weight"])) < 1e-7
    positions = case.common["position_ids"][:, 48:].view(2, 16, -1)
    assert torch.equal(blocks.position_ids, case.kept(positions))


def test_golden_anchors_are_legal_and_all_of_the_candidates_where_few() -> None:
    mask = tensors("inputs")["loss_mask"].bool().numpy()
    candidates = tensors("inputs")["anchor_candidate_mask"].numpy()
    for row in range(2):
        assert np.array_equal(legal_anchors(mask[row]), np.flatnonzero(candidates[row]))
    assert np.array_equal(draw_anchors(mask[1], 16, seed=3, epoch=0, position=9), golden_anchors()[1])


@given(MASKS, st.integers(0, 70), st.integers(0, 2**63), st.integers(0, 50), st.integers(0, 2**40))
def test_drawn_anchors(mask: np.ndarray, num_anchors: int, seed: int, epoch: int, position: int) -> None:
    anchors = draw_anchors(mask, num_anchors, seed=seed, epoch=epoch, position=position)
    assert anchors.dtype == np.int64
    assert len(anchors) == min(num_anchors, len(legal_anchors(mask)))
    assert np.all(np.diff(anchors) > 0)
    assert np.all(mask[anchors] & mask[anchors + 1])
    np.random.default_rng().random(3)  # other generators have no say
    assert np.array_equal(anchors, draw_anchors(mask, num_anchors, seed=seed, epoch=epoch, position=position))


def test_each_part_of_the_key_matters_and_every_anchor_is_drawn_equally_often() -> None:
    mask = np.ones(41, dtype=bool)

    def draw(seed: int, epoch: int, position: int) -> list[int]:
        return draw_anchors(mask, 5, seed=seed, epoch=epoch, position=position).tolist()

    keys = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    assert len({tuple(draw(*key)) for key in keys}) == 4
    counts = np.bincount(np.concatenate([draw(0, 3, position) for position in range(4000)]), minlength=40)
    assert counts.sum() == 20000
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 72  # 99.9 % with 39 degrees of freedom; draws without replacement vary less


@given(MASKS, st.integers(1, 9))
def test_labels_of_all_legal_anchors_cover_what_can_be_drafted(mask: np.ndarray, block_size: int) -> None:
    ids = torch.arange(len(mask))[None]
    blocks = build_blocks(ids, torch.from_numpy(mask)[None], [legal_anchors(mask)], config(block_size), 4.0)
    covered = set(blocks.labels[blocks.supervised].tolist())  # token ids are positions here
    draftable = {p for p in range(1, len(mask)) if mask[p] and mask[p - 1]}
    assert covered == draftable
    assert blocks.draftable_tokens == len(draftable)


@given(st.data(), st.integers(1, 9), st.sampled_from([None, 0.0, 1.0, 4.0]), st.booleans())
def test_blocks_are_what_a_loop_would_build(
    data: st.DataObject, block_size: int, gamma: float | None, sample_from_anchor: bool
) -> None:
    masks = data.draw(st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4))
    mask = np.array(masks, dtype=bool)
    ids = torch.arange(mask.size).view(mask.shape)
    anchors = [np.array(sorted(data.draw(st.sets(st.sampled_from(list(legal_anchors(m)))))) if len(legal_anchors(m))
                        else [], dtype=np.int64) for m in mask]  # fmt: skip
    settings = config(block_size, sample_from_anchor=sample_from_anchor)
    blocks = build_blocks(ids, torch.from_numpy(mask), anchors, settings, gamma)
    index = 0
    for row, chosen in enumerate(anchors):
        total = 0.0
        for anchor in chosen.tolist():
            assert (int(blocks.rows[index]), int(blocks.anchors[index])) == (row, anchor)
            slots = block_size if sample_from_anchor else block_size + 1
            assert blocks.input_ids[index].tolist() == [int(ids[row, anchor]), *[190] * (slots - 1)]
            assert blocks.position_ids[index].tolist() == list(range(anchor, anchor + slots))
            alive = True
            for k in range(block_size):
                label = anchor + 1 + k
                alive = alive and label < 12 and bool(mask[row, label])
                weight = (np.exp(-k / gamma) if gamma else 1.0) if alive else 0.0
                assert bool(blocks.supervised[index, k]) == alive
                assert float(blocks.weights[index, k]) == pytest.approx(weight, rel=1e-6)
                if alive:
                    assert int(blocks.labels[index, k]) == int(ids[row, label])
                    assert int(blocks.previous_ids[index, k]) == int(ids[row, label - 1])
                    assert int(blocks.context_rows[index, k]) == label - 1
                total += weight
            index += 1
        assert block_weight_sum(mask[row], chosen, settings, gamma) == pytest.approx(total, rel=1e-6)
    assert index == len(blocks.anchors)


def test_garbage_where_nothing_is_supervised_never_enters_a_block() -> None:
    inputs = tensors("inputs")
    mask = inputs["loss_mask"].bool()
    spoiled = inputs["input_ids"].masked_fill(~mask, -1)
    spoiled[1, -3:] = 199
    blocks = build_blocks(spoiled, mask, golden_anchors(), drafter_config(), 4.0)
    clean = golden_blocks(drafter_config())
    for name in ("labels", "previous_ids", "context_rows", "input_ids", "weights"):
        assert torch.equal(getattr(blocks, name), getattr(clean, name)), name


def test_batches_without_anchors_or_without_samples() -> None:
    none = np.zeros(0, dtype=np.int64)
    for rows in (0, 2):
        blocks = build_blocks(
            torch.zeros(rows, 1, dtype=torch.int64),
            torch.zeros(rows, 1, dtype=torch.bool),
            [none] * rows,
            config(7),
            4.0,
        )
        assert blocks.labels.shape == (0, 7)
        assert float(blocks.weights.sum()) == 0.0


def test_illegal_anchors_are_refused() -> None:
    ids, mask = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[False, True, True, False, True]])
    with pytest.raises(AnchorError, match=r"document 0: anchors \[2, 4\] are not legal"):
        build_blocks(ids, mask, [np.array([1, 2, 4])], config(7), 4.0)
    with pytest.raises(AnchorError, match="anchors for 2 samples in a batch of 1"):
        build_blocks(ids, mask, [np.array([1]), np.array([1])], config(7), 4.0)


def config(block_size: int, *, sample_from_anchor: bool = True) -> DrafterConfig:
    return drafter_config(block_size=block_size, sample_from_anchor=sample_from_anchor)
