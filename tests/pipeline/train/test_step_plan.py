from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.anchors import legal_anchors
from pipeline.train.step_plan import AnchorRecipe, StepPlanner
from tests.pipeline.train.rig import answer_mask
from tests.pipeline.train.test_loop import DRAFTER

MASKS = [answer_mask(6 + 3 * i, 2 + i % 3) for i in range(11)] + [answer_mask(5, 4)]
RECIPE = AnchorRecipe(
    drafter=DRAFTER,
    seed=7,
    num_samples=len(MASKS),
    global_batch_size=5,
    num_anchors=4,
    max_length=20,
    decay_gamma=4.0,
)


@given(step=st.integers(0, 30), world_size=st.integers(1, 8))
def test_anchors_and_total_weight_do_not_depend_on_the_ranks(step: int, world_size: int) -> None:
    whole = StepPlanner(MASKS.__getitem__, RECIPE, rank=0, world_size=1).plan(step)
    parts = [
        StepPlanner(MASKS.__getitem__, RECIPE, rank=r, world_size=world_size).plan(step) for r in range(world_size)
    ]
    merged = {key: anchors for part in parts for key, anchors in part.anchors.items()}
    assert merged.keys() == whole.anchors.keys()
    assert all(np.array_equal(merged[key], whole.anchors[key]) for key in merged)
    assert sum(part.weight for part in parts) == pytest.approx(whole.weight)


def test_anchors_respect_the_cut_and_the_budget() -> None:
    planner = StepPlanner(MASKS.__getitem__, RECIPE, rank=0, world_size=1)
    for step in range(20):
        for (_, position), anchors in planner.plan(step).anchors.items():
            legal = legal_anchors(MASKS[position][:20])
            assert len(anchors) == min(4, len(legal))
            assert np.isin(anchors, legal).all()


def test_sample_without_legal_anchor_weighs_nothing() -> None:
    planner = StepPlanner(lambda position: answer_mask(5, 4), RECIPE, rank=0, world_size=1)
    assert planner.plan(0).weight == 0.0
