"""What an optimizer step will train on, known before its first forward pass: anchors and their weights.

Both follow from the cache's index alone, so the step's global denominator Σw costs one number per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cache_store.order import rank_slice, step_samples
from model.anchors import block_weight_sum, draw_anchors
from model.config import DrafterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorRecipe:
    """Everything that the anchors of a step depend on, besides the loss masks."""

    drafter: DrafterConfig
    seed: int
    num_samples: int
    global_batch_size: int
    num_anchors: int
    max_length: int
    decay_gamma: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One rank's share of a step."""

    anchors: dict[tuple[int, int], np.ndarray]
    """(epoch, position) of a sample -> its anchors, int64, ascending."""
    weight: float
    """Σw over this rank's slots."""


class StepPlanner:
    """Plans of one rank. `loss_mask(position)` gives bool [T] of a sample."""

    def __init__(
        self, loss_mask: Callable[[int], np.ndarray], recipe: AnchorRecipe, *, rank: int, world_size: int
    ) -> None:
        self._loss_mask, self._recipe = loss_mask, recipe
        self._slice = rank_slice(recipe.global_batch_size, rank, world_size)

    def plan(self, step: int) -> StepPlan:
        """The rank's samples of a step, their anchors and the weight of all their slots."""
        recipe = self._recipe
        epochs, positions = step_samples(recipe.seed, recipe.num_samples, recipe.global_batch_size, step)
        anchors, weight = {}, 0.0
        for place in self._slice:
            epoch, position = int(epochs[place]), int(positions[place])
            mask = self._loss_mask(position)[: recipe.max_length]
            drawn = draw_anchors(mask, recipe.num_anchors, seed=recipe.seed, epoch=epoch, position=position)
            anchors[epoch, position] = drawn
            weight += block_weight_sum(mask, drawn, recipe.drafter, recipe.decay_gamma)
        return StepPlan(anchors, weight)
