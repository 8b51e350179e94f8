from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError
from pipeline.plan import TargetSize, drafter_parameters, format_plan, make_plan, target_size, total_steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def full_size(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)
    return load_config("jobs/configs/qwen3_4b.yaml")


def test_qwen3_4b_is_priced_without_weights(full_size: Config) -> None:
    size = target_size(full_size)
    plan = make_plan(full_size, size, 1_300_000)
    # faults D1: 30.7 kB a token; 38 TB are 1.24 billion tokens.
    assert plan.raw_bytes / plan.tokens == 6 * 2560 * 2
    assert plan.raw_bytes == pytest.approx(38e12, rel=0.02)
    assert plan.stored_bytes < 0.70 * plan.raw_bytes
    assert plan.target_parameters == pytest.approx(4.02e9, rel=0.01)
    assert plan.steps == 10 * 1_300_000 // 512
    text = format_plan(plan, full_size)
    for word in ("TB", "shards", "GiB", "optimizer steps"):
        assert word in text


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_drafter_parameters_equal_the_built_one(full_size: Config, head: str) -> None:
    import torch

    from model.config import DrafterConfig, DrafterShape
    from model.drafter import DSparkDrafter

    size = target_size(full_size)
    rank = 0 if head == "none" else 16
    config = full_size.model_copy(
        update={"drafter": full_size.drafter.model_copy(update={"markov_head": head, "markov_rank": rank})}
    )
    drafter = config.drafter
    shape = DrafterShape(
        block_size=drafter.block_size,
        num_draft_layers=drafter.num_draft_layers,
        mask_token_id=151669,
        target_layer_ids=config.extraction.layer_ids,
        markov_head_type=head,
        markov_rank=rank,
        enable_confidence_head=True,
        confidence_head_with_markov=rank > 0,
        sample_from_anchor=True,
    )
    import json

    facts = json.loads((ROOT / "jobs/configs/targets/qwen3_4b.json").read_text())
    with torch.device("meta"):
        built = DSparkDrafter(DrafterConfig.from_target(facts, shape=shape))
    counted = sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
    assert drafter_parameters(config, size) == counted


def test_too_few_prompts_for_one_step(full_size: Config) -> None:
    plan = make_plan(full_size, target_size(full_size), 10)
    assert plan.steps == 0
    assert "optimizer steps" in format_plan(plan, full_size)
    assert "do not fill one training.global_batch_size of 512; training refuses" in format_plan(plan, full_size)


def test_target_that_is_nowhere(full_size: Config) -> None:
    lost = full_size.model_copy(update={"plan": full_size.plan.model_copy(update={"target_config": None})})
    with pytest.raises(ConfigError, match=r"plan\.target_config"):
        target_size(lost)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not the config.json"),
        (b"[]", "not the config.json"),
        (b"\xff", "not the config.json"),
        (b'{"num_attention_heads": "8", "hidden_size": 8}', "lacks 'num_hidden_layers'"),
        (b"{}", "lacks 'num_attention_heads'"),
    ],
)
def test_a_broken_target_config_is_named(full_size: Config, tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    plan = full_size.plan.model_copy(update={"target_config": str(file)})
    with pytest.raises(ConfigError, match=f"{file}: {message}"):
        target_size(full_size.model_copy(update={"plan": plan}))


def test_tied_and_untied_sizes_differ_by_one_matrix() -> None:
    facts = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    tied = TargetSize.from_facts({**facts, "tie_word_embeddings": True})
    assert TargetSize.from_facts(facts).parameters - tied.parameters == 8 * 11


@pytest.mark.parametrize(
    ("samples", "epochs", "batch", "steps"),
    [
        (100, 10, 32, 31),
        (5, 1, 32, 0),
        (100, 0.29, 29, 1),
        (100, 0.57, 57, 1),
        (64, 0.5, 16, 2),
        (512, 10, 512, 10),
    ],
)
def test_total_steps(samples: int, epochs: float, batch: int, steps: int) -> None:
    assert total_steps(samples, epochs, batch) == steps
