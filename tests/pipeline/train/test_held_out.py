from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.mixture import SampleSet
from cache_store.packing import StreamConfig
from model.losses import DrafterInputs, LossOutput
from pipeline.errors import ConfigError
from pipeline.train.held_out import HeldOut
from pipeline.train.recipe import prepare_job, training_sources
from pipeline.train.step_plan import AnchorRecipe
from tests.pipeline.train.rig import answer_mask, make_cache, make_config, make_target, mixed_masks
from tests.pipeline.train.test_loop import CONFIG, FakeEngine

FRACTION = 0.4


class WeightEngine(FakeEngine):
    """The loss of a block is its weight; nothing else is looked at."""

    def evaluate(self, inputs: DrafterInputs) -> LossOutput:
        count = inputs.blocks.weights.sum()
        metrics = {"loss/num": 3 * count, "loss/den": count, "blocks/num": inputs.blocks.supervised.any(1).sum()}
        return LossOutput(total=count, weight=count, metrics=metrics | {"blocks/den": torch.tensor(1.0)})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("held_out")
    make_target(root / "target")
    make_cache(str(root / "cache"), [*mixed_masks(20), answer_mask(9, 8)])
    return root


def config(root: Path, **data: Any) -> Any:
    return make_config(root, data={"held_out_fraction": FRACTION, **data})


def test_the_two_sides_share_nothing(root: Path) -> None:
    job = prepare_job(config(root))
    train, held_out = (
        {reader.sample_id(row) for p in range(len(samples)) for reader, row in [samples.find(0, p)]}
        for samples in (SampleSet(job.sources), SampleSet(job.held_out))
    )
    assert len(held_out) == job.num_held_out
    assert len(train) == job.num_samples
    assert not train & held_out
    assert len(train | held_out) == 21
    assert any("in the held_out split" in line for line in job.data)
    assert prepare_job(make_config(root)).held_out == ()


def test_weights_of_a_mix_do_not_count_on_the_held_out_side(root: Path) -> None:
    job = prepare_job(config(root, weight=2.0))
    assert job.num_samples == 2 * (21 - job.num_held_out)


def test_a_split_without_samples_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="held_out_fraction 1e-12 holds out no sample; raise it, or set it to 0"):
        prepare_job(make_config(root, data={"held_out_fraction": 1e-12}))


@pytest.mark.parametrize("pack", [None, 48])
def test_every_number_of_ranks_measures_the_same(root: Path, pack: int | None) -> None:
    job = prepare_job(config(root))
    shares: list[list[float]] = []

    def measure(rank: int, world: int, total: Any) -> dict[str, float]:
        stream = StreamConfig(
            seed=1,
            global_batch_size=job.num_held_out,
            micro_batch_size=2,
            max_length=24,
            pack_tokens=pack,
            rank=rank,
            world_size=world,
            num_steps=1,
        )
        recipe = AnchorRecipe(drafter=job.drafter, num_anchors=3, decay_gamma=4.0)
        loop = replace(CONFIG, drafter=job.drafter)
        sources = training_sources(config(root), "held_out")
        return HeldOut(sources, stream, recipe, loop, total, "first").measure(WeightEngine())

    def note(values: Sequence[float]) -> list[float]:
        shares.append(list(values))
        return list(values)

    whole = measure(0, 1, note)
    assert whole["held_out_loss"] == pytest.approx(3.0)
    sums = shares.pop()
    for world in (2, 5, 30):  # with 30 ranks most have no sample at all
        for rank in range(world):
            measure(rank, world, note)
        found = [sum(column) for column in zip(*shares, strict=True)]
        # "blocks/den" counts micro-batches, which differ; everything else adds up to the same.
        assert found[1:] == pytest.approx(sums[1:])
        shares.clear()
