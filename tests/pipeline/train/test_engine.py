from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cache_store.dataset import TargetCacheStream
from cache_store.mixture import SampleSet
from cache_store.order import rank_slice, step_samples
from cache_store.packing import StreamConfig
from model.anchors import build_blocks
from model.drafter import DSparkDrafter
from model.losses import DrafterInputs, reference_loss
from model.target_heads import load_target_heads
from pipeline.config import Config
from pipeline.train.checkpoint import checksum, read_parameters, read_state
from pipeline.train.engine import EngineConfig, deepspeed_config
from pipeline.train.recipe import prepare_job
from pipeline.train.step_plan import AnchorRecipe, StepPlanner
from tests.pipeline.train.rig import answer_mask, make_cache, make_config, make_target, mixed_masks, run_ranks
from tests.pipeline.train.scenarios import checkpoint_of, train_all

GLOBAL_BATCH = 8
UNCLIPPED = 1e9


def first_gradient(config: Config) -> dict[str, torch.Tensor]:
    """The gradient of step 0: after one update exp_avg = (1 - beta1) · gradient."""
    parameters = read_parameters(checkpoint_of(config, 1))
    return {name: parameter.exp_avg / (1 - config.training.betas[0]) for name, parameter in parameters.items()}


def expected_gradient(config: Config) -> dict[str, torch.Tensor]:
    """Plain autograd over the whole global batch at once, without engine, loop or chunked loss."""
    job = prepare_job(config)
    stream = StreamConfig(
        seed=42, global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH, max_length=24, num_steps=1
    )
    (batch,) = TargetCacheStream(job.sources, stream)
    recipe = AnchorRecipe(drafter=job.drafter, num_anchors=5, decay_gamma=4.0)
    plan = StepPlanner(SampleSet(job.sources), stream, recipe).plan(0)
    anchors = [plan.anchors[key] for key in zip(batch.epochs.tolist(), batch.positions.tolist(), strict=True)]
    blocks = build_blocks(batch.input_ids, batch.loss_mask, anchors, job.drafter, 4.0)
    drafter = DSparkDrafter(job.drafter).init_weights(42)
    heads = load_target_heads(config.target.path, dtype=torch.float32)
    output = reference_loss(
        drafter, heads, DrafterInputs(batch.hidden_states.float(), batch.last_hidden_state.float(), blocks), job.loss
    )
    (output.total / output.weight).backward()
    assert plan.weight == pytest.approx(float(output.weight), rel=1e-6)
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


SPLITS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 8, "zero_stage": 1},
    "four": {"micro_batch_size": 2, "zero_stage": 2, "loader_workers": 2},
    "plain": {"micro_batch_size": 3, "zero_stage": 0},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """One step of the same 8 samples in several splits (a rank of two has no legal anchor), and 100 real steps."""
    root = tmp_path_factory.mktemp("gradients")
    make_target(root / "target")
    _, positions = step_samples(42, GLOBAL_BATCH, GLOBAL_BATCH, 0)
    masks = mixed_masks(GLOBAL_BATCH)
    for place in rank_slice(GLOBAL_BATCH, 1, 2):  # rank 1 of 2 gets one-token answers only
        masks[positions[place]] = answer_mask(9, 8)
    make_cache(str(root / "cache"), masks)

    def config(name: str, **training: Any) -> Config:
        return make_config(root, output=name, **training)

    unclipped = {"epochs": 1, "gradient_clip": UNCLIPPED}
    single = {name: config(name, **unclipped, **split) for name, split in SPLITS.items()}
    double = {f"two_{name}": config(f"two_{name}", **unclipped, **split) for name, split in SPLITS.items()}
    # The real recipe: bf16, ZeRO 1, the default lr and clip.
    single["hundred"] = config(
        "hundred",
        precision="bf16",
        epochs=100,
        lr=6e-4,
        micro_batch_size=4,
        checkpoint_every_steps=50,
        log_every_steps=50,
    )
    target = (root / "target" / "model.safetensors").read_bytes()
    results = run_ranks(1, root / "ranks", train_all, list(single.values()))
    results += run_ranks(2, root / "ranks", train_all, list(double.values()))
    assert {result.failure for rank in results for result in rank} == {None}
    assert (root / "target" / "model.safetensors").read_bytes() == target
    return single | double


@pytest.mark.parametrize("name", ["one", "four", "plain", "two_one", "two_four", "two_plain"])
def test_gradient_is_that_of_the_global_weighted_mean_for_any_split(runs: dict[str, Config], name: str) -> None:
    expected, found = expected_gradient(runs["one"]), first_gradient(runs[name])
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5, msg=parameter)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


def test_every_trainable_tensor_moves_under_bf16(runs: dict[str, Config]) -> None:
    path = checkpoint_of(runs["hundred"], 100)
    assert read_state(path).unchanged == []
    initial = DSparkDrafter(prepare_job(runs["hundred"]).drafter).init_weights(42)
    for name, parameter in read_parameters(path).items():
        rounded = dict(initial.named_parameters())[name].detach().bfloat16().float()
        assert checksum(parameter.master) != checksum(rounded), name
        assert float((parameter.master - rounded).abs().max()) > 1e-3, name


def test_exported_drafter_is_the_rounded_master(runs: dict[str, Config]) -> None:
    exported = load_file(Path(runs["hundred"].training.output) / "drafter" / "model.safetensors")
    masters = read_parameters(checkpoint_of(runs["hundred"], 100))
    assert exported.keys() == masters.keys()
    for name, parameter in masters.items():
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name], parameter.master.bfloat16())
    # Masters are finer than the weights that compute: they were not rebuilt from bf16.
    assert any(not torch.equal(exported[name].float(), parameter.master) for name, parameter in masters.items())


@pytest.mark.parametrize(("stage", "accumulate"), [(0, "bf16"), (1, "fp32"), (2, "fp32")])
def test_deepspeed_config_accumulates_in_float32_under_zero(stage: int, accumulate: str) -> None:
    config = deepspeed_config(
        EngineConfig(
            precision="bf16",
            zero_stage=stage,
            micro_batch_size=2,
            gradient_clip=1.0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )
    )
    assert config["data_types"]["grad_accum_dtype"] == accumulate
    assert config["communication_data_type"] == "fp32"
    assert config["gradient_accumulation_steps"] == 1, "the loop names the last micro-batch of a step"


def test_checksum_sees_one_changed_bit() -> None:
    values = torch.from_numpy(np.linspace(0, 1, 100, dtype=np.float32).reshape(10, 10)).clone()
    before = checksum(values)
    values[3, 7] = torch.nextafter(values[3, 7], torch.tensor(2.0))
    assert checksum(values) != before
