from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.packing import StreamConfig
from model.anchors import legal_anchors
from pipeline.train.step_plan import AnchorRecipe, StepPlanner
from tests.pipeline.train.rig import answer_mask
from tests.pipeline.train.test_loop import DRAFTER

MASKS = [answer_mask(6 + 3 * i, 2 + i % 3) for i in range(11)] + [answer_mask(5, 4)]
RECIPE = AnchorRecipe(
    drafter=DRAFTER,
    num_anchors=4,
    decay_gamma=4.0,
)


class Masks:
    """Samples that are masks alone."""

    def __init__(self, masks: list[np.ndarray]) -> None:
        self._masks = masks

    def __len__(self) -> int:
        return len(self._masks)

    def tokens(self, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.array([len(self._masks[position]) for position in positions])

    def loss_mask(self, epoch: int, position: int) -> np.ndarray:
        return self._masks[position]


def planner(masks: list[np.ndarray] = MASKS, **changes: Any) -> StepPlanner:
    settings = {"seed": 7, "global_batch_size": 5, "micro_batch_size": 2, "max_length": 20, "num_steps": 99}
    return StepPlanner(Masks(masks), StreamConfig(**{**settings, **changes}), RECIPE)


@given(step=st.integers(0, 30), world_size=st.integers(1, 8), budget=st.none() | st.integers(20, 60))
def test_anchors_and_total_weight_do_not_depend_on_the_ranks(step: int, world_size: int, budget: int | None) -> None:
    whole = planner().plan(step)
    parts = [planner(rank=rank, world_size=world_size, pack_tokens=budget).plan(step) for rank in range(world_size)]
    assert len({part.micro_batches for part in parts}) == 1
    merged = {key: anchors for part in parts for key, anchors in part.anchors.items()}
    assert merged.keys() == whole.anchors.keys()
    assert all(np.array_equal(merged[key], whole.anchors[key]) for key in merged)
    assert sum(part.weight for part in parts) == pytest.approx(whole.weight)


def test_anchors_respect_the_cut_and_the_budget() -> None:
    for step in range(20):
        for (_, position), anchors in planner().plan(step).anchors.items():
            legal = legal_anchors(MASKS[position][:20])
            assert len(anchors) == min(4, len(legal))
            assert np.isin(anchors, legal).all()


def test_sample_without_legal_anchor_weighs_nothing() -> None:
    assert planner([answer_mask(5, 4)] * 12).plan(0).weight == 0.0
