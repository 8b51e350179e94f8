"""What an optimizer step will train on, known before its first forward pass: anchors and their weights.

Both follow from the cache's index alone, so the step's global denominator Σw costs one number per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cache_store.packing import StreamConfig, share_of_step
from model.anchors import block_weight_sum, draw_anchors
from model.config import DrafterConfig


class Samples(Protocol):
    """What the planner needs of cache_store.mixture.SampleSet."""

    def __len__(self) -> int: ...
    def tokens(self, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray: ...
    def loss_mask(self, epoch: int, position: int) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorRecipe:
    """What the anchors of a step depend on, besides its samples and their loss masks."""

    drafter: DrafterConfig
    num_anchors: int
    decay_gamma: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One rank's share of a step."""

    anchors: dict[tuple[int, int], np.ndarray]
    """(epoch, position) of a sample -> its anchors, int64, ascending."""
    weight: float
    """Σw over this rank's slots."""
    micro_batches: int
    """Micro-batches of the step, the same on every rank."""


class StepPlanner:
    """Plans of the rank that `stream` describes."""

    def __init__(self, samples: Samples, stream: StreamConfig, recipe: AnchorRecipe) -> None:
        self._samples, self._stream, self._recipe = samples, stream, recipe

    def plan(self, step: int) -> StepPlan:
        """The rank's samples of a step, their anchors and the weight of all their slots."""
        recipe, stream = self._recipe, self._stream
        share = share_of_step(stream, len(self._samples), self._samples.tokens, step)
        anchors, weight = {}, 0.0
        for place in share.places:
            epoch, position = int(share.epochs[place]), int(share.positions[place])
            mask = self._samples.loss_mask(epoch, position)[: stream.max_length]
            if recipe.drafter.kind == "eagle3":
                # Without a prompt the first token would be an anchor, but EAGLE-3 needs the position before one.
                mask = mask & (np.arange(len(mask)) > 0)
            drawn = draw_anchors(mask, recipe.num_anchors, seed=stream.seed, epoch=epoch, position=position)
            anchors[epoch, position] = drawn
            weight += block_weight_sum(mask, drawn, recipe.drafter, recipe.decay_gamma)
        return StepPlan(anchors, weight, share.micro_batches)
