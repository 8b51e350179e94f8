"""DFlash and EAGLE-3 in the real loop and engine, from the same cache as DSpark; packed rows; warm start; windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_store.dataset import TargetCacheStream
from cache_store.mixture import SampleSet
from cache_store.order import rank_slice, step_samples
from cache_store.packing import StreamConfig
from model.export import load_drafter
from model.family import drafter_loss, new_drafter
from model.target_heads import load_target_heads
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.train.checkpoint import checksum, read_parameters, read_state
from pipeline.train.loop import LoopConfig, make_inputs
from pipeline.train.metrics import read_metrics
from pipeline.train.recipe import TrainingJob, prepare_job
from pipeline.train.step_plan import AnchorRecipe, StepPlanner
from tests.pipeline.train.rig import answer_mask, make_cache, make_config, make_target, mixed_masks, run_ranks
from tests.pipeline.train.scenarios import checkpoint_of, train_all, train_and_watch_heads

GLOBAL_BATCH = 8
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {"markov_rank": 8},
    "sliding": {
        "markov_rank": 8,
        "num_draft_layers": 2,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "dflash": {"kind": "dflash"},
    "eagle3": {"kind": "eagle3"},
}
PACKED = {"micro_batch_size": 2, "zero_stage": 1, "data": {"pack": True}}
TWO_RANKS = {"micro_batch_size": 2, "zero_stage": 2}


def kind_config(root: Path, kind: str, name: str, **training: Any) -> Config:
    base = make_config(root, output=name, **training).model_dump(mode="json")
    drafter = {"num_draft_layers": 1} if "num_draft_layers" not in DRAFTERS[kind] else {}
    base["drafter"] = {"block_size": 4, "mask_token": 96, **drafter, **DRAFTERS[kind]}
    base["training"].pop("loss")
    return Config.model_validate(base)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    make_target(folder / "target")
    _, positions = step_samples(42, GLOBAL_BATCH, GLOBAL_BATCH, 0)
    masks = mixed_masks(GLOBAL_BATCH)
    for place in rank_slice(GLOBAL_BATCH, 1, 2):  # rank 1 of 2 gets one-token answers only: no legal anchor
        masks[positions[place]] = answer_mask(9, 8)
    masks[positions[0]] = answer_mask(12, 0)  # no prompt: its first token is no anchor for EAGLE-3
    make_cache(str(folder / "cache"), masks)
    return folder


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Config]:
    """One step of the same 8 samples for each kind: packed rows on one rank, padded ones on two; then a warm start."""
    once = {"epochs": 1, "gradient_clip": 1e9}
    single = {f"{kind}-packed": kind_config(root, kind, f"{kind}-packed", **once, **PACKED) for kind in DRAFTERS}
    double = {f"{kind}-two": kind_config(root, kind, f"{kind}-two", **once, **TWO_RANKS) for kind in DRAFTERS}
    source = str(root / "dflash-packed" / "drafter")  # exists when its turn comes
    single["warm"] = kind_config(root, "dspark", "warm", epochs=1, init_from=source)
    results = run_ranks(1, root / "ranks", train_all, list(single.values()))
    results += run_ranks(2, root / "ranks", train_all, list(double.values()))
    assert {result.failure for rank in results for result in rank} == {None}
    return single | double


def expected_gradient(job: TrainingJob) -> dict[str, Tensor]:
    """Autograd over the whole global batch at once, on padded rows, without engine and loop."""
    stream = StreamConfig(seed=42, global_batch_size=8, micro_batch_size=8, max_length=24, num_steps=1)
    (batch,) = TargetCacheStream(job.sources, stream)
    recipe = AnchorRecipe(drafter=job.drafter, num_anchors=5, decay_gamma=job.loss.decay_gamma)
    plan = StepPlanner(SampleSet(job.sources), stream, recipe).plan(0)
    anchors = [plan.anchors[key] for key in zip(batch.epochs.tolist(), batch.positions.tolist(), strict=True)]
    settings: dict[str, Any] = dict.fromkeys(
        ("total_steps", "start_step", "start_skipped", "samples_per_epoch", "global_batch_size", "checkpoint_every"), 1
    )
    loop = LoopConfig(
        **settings,
        drafter=job.drafter,
        decay_gamma=job.loss.decay_gamma,
        log_every=1,
        world_size=1,
        device=torch.device("cpu"),
    )
    drafter = new_drafter(job.drafter).init_weights(42)
    heads = load_target_heads(job.config.target.path, dtype=torch.float32)
    output = drafter_loss(drafter, heads, make_inputs(batch, anchors, loop), job.loss)
    assert plan.weight == pytest.approx(float(output.weight), rel=1e-6)
    (output.total / output.weight).backward()
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("split", ["packed", "two"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_split_has_the_gradient_of_the_global_weighted_mean(
    runs: dict[str, Config], kind: str, split: str
) -> None:
    expected = expected_gradient(prepare_job(runs[f"{kind}-two"]))
    config = runs[f"{kind}-{split}"]
    parameters = read_parameters(checkpoint_of(config, 1))
    assert parameters.keys() == expected.keys()
    for name, gradient in expected.items():
        found = parameters[name].exp_avg / (1 - config.training.betas[0])
        torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-5, msg=name)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


def test_packed_rows_log_the_same_metrics(runs: dict[str, Config]) -> None:
    for kind in DRAFTERS:
        padded, packed = (
            read_metrics(Path(runs[f"{kind}-{name}"].training.output) / "metrics.jsonl")[0]
            for name in ("two", "packed")
        )
        for name in ("loss", "tau", "ce_loss", "accept_rate@1", "anchor_coverage", "grad_norm"):
            assert packed[name] == pytest.approx(padded[name], rel=1e-4), (kind, name)


def test_exports_load_as_what_they_are(runs: dict[str, Config]) -> None:
    for kind in DRAFTERS:
        job = prepare_job(runs[f"{kind}-two"])
        loaded = load_drafter(job.output / "drafter")
        assert loaded.config == job.drafter
        masters = read_parameters(checkpoint_of(runs[f"{kind}-two"], 1))
        assert all(torch.equal(p, masters[name].master) for name, p in loaded.named_parameters())


def test_dspark_starts_from_the_exported_dflash(root: Path, runs: dict[str, Config]) -> None:
    source, config = root / "dflash-packed" / "drafter", runs["warm"]
    events = [json.loads(line)["event"] for line in (root / "warm" / "events.jsonl").read_text().splitlines()]
    assert events[0].startswith(f"started from {source}: ")
    assert events[0].endswith(
        "new: markov_head.markov_w1.weight, markov_head.markov_w2.weight, confidence_head.proj.weight, "
        "confidence_head.proj.bias"
    )
    # One step of lr 0.01 from there, not from the initial weights.
    warm, taken = read_parameters(checkpoint_of(config, 1)), load_drafter(source).state_dict()
    assert max(float((warm[name].master - tensor).abs().max()) for name, tensor in taken.items()) < 0.011
    fresh = new_drafter(prepare_job(config).drafter).init_weights(42).state_dict()
    assert float((warm["norm.weight"].master - fresh["norm.weight"]).abs().max()) > 0.011


def test_a_start_that_does_not_fit_is_refused_before_any_worker(root: Path, runs: dict[str, Config]) -> None:
    source = Path(runs["eagle3-two"].training.output) / "drafter"
    with pytest.raises(ConfigError, match=r"training.init_from: .*cannot start from it"):
        prepare_job(kind_config(root, "dspark", "no", init_from=str(source)))
    with pytest.raises(ConfigError, match=r"training.init_from: .*cannot be read"):
        prepare_job(kind_config(root, "dspark", "no", init_from=str(root / "nothing")))


@pytest.mark.slow
def test_a_hundred_real_steps_move_every_tensor_of_every_kind_and_no_frozen_one(root: Path) -> None:
    """E15: bf16 with float32 masters, ZeRO 1, the recipe's lr and clip."""
    real = {"precision": "bf16", "epochs": 100, "lr": 6e-4, "micro_batch_size": 4, "log_every_steps": 50}
    configs = [kind_config(root, kind, f"hundred-{kind}", **real) for kind in DRAFTERS]
    (frozen,) = run_ranks(1, root / "hundred-ranks", train_and_watch_heads, configs)
    assert all(before == after for before, after in frozen)
    for config in configs:
        job, path = prepare_job(config), checkpoint_of(config, 100)
        assert read_state(path).unchanged == []
        initial = dict(new_drafter(job.drafter).init_weights(42).named_parameters())
        for name, parameter in read_parameters(path).items():
            rounded = initial[name].detach().bfloat16().float()
            assert checksum(parameter.master) != checksum(rounded), name
            assert float((parameter.master - rounded).abs().max()) > 1e-3, name
