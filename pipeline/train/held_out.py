"""The objective on conversations that training never sees: the same loss and metrics, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cache_store.dataset import TargetCacheStream
from cache_store.mixture import SampleSet, Source
from cache_store.packing import StreamConfig
from cache_store.reader import Verify
from model.losses import metric_values
from pipeline.train.loop import Engine, LoopConfig, make_inputs
from pipeline.train.step_plan import AnchorRecipe, StepPlanner

PREFIX = "held_out_"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One rank's share of the held-out samples: always the same ones, with the same anchors."""

    sources: tuple[Source, ...]
    stream: StreamConfig
    """One step over all of them."""
    recipe: AnchorRecipe
    loop: LoopConfig
    sum_over_ranks: Callable[[Sequence[float]], list[float]]
    verify: Verify

    def measure(self, engine: Engine) -> dict[str, float]:
        """Metrics over the samples of all ranks, named `held_out_<metric>`; a collective at its end."""
        plan = StepPlanner(SampleSet(self.sources, verify="never"), self.stream, self.recipe).plan(0)
        names: list[str] = []
        sums = torch.zeros(0, dtype=torch.float64)
        for batch in TargetCacheStream(self.sources, self.stream, verify=self.verify):
            keys = zip(batch.epochs.tolist(), batch.positions.tolist(), strict=True)
            anchors = [plan.anchors[key] for key in keys]
            metrics = engine.evaluate(make_inputs(batch, anchors, self.loop)).metrics
            names = sorted(metrics)
            values = torch.stack([metrics[name].detach() for name in names]).double().cpu()
            if not any(len(drawn) for drawn in anchors):  # a made-up block: only the metrics' names count
                values = torch.zeros_like(values)
            sums = values if not len(sums) else sums + values
        totals = self.sum_over_ranks(sums.tolist())
        found = metric_values(dict(zip(names, totals, strict=True)))
        return {PREFIX + name: value for name, value in found.items()}
