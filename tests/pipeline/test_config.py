from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config import Config, dump_config, load_config
from pipeline.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "jobs" / "configs").glob("*.yaml"))
DEMO = next(path for path in CONFIGS if path.stem == "smollm2_demo")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load_and_round_trip(path: Path) -> None:
    config = load_config(path)
    assert Config.model_validate(yaml.safe_load(dump_config(config))) == config


def test_full_size_recipe_is_the_papers() -> None:
    config = load_config(next(path for path in CONFIGS if path.stem == "qwen3_4b"))
    assert config.extraction.layer_ids == (1, 9, 17, 25, 33)
    drafter, training = config.drafter, config.training
    assert (drafter.block_size, drafter.num_draft_layers, drafter.markov_rank) == (7, 5, 256)
    assert (training.num_workers, training.num_anchors, training.max_length, training.epochs) == (8, 512, 4096, 10)
    assert (training.lr, training.warmup_ratio, training.gradient_clip, training.global_batch_size) == (
        6e-4,
        0.04,
        1.0,
        512,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lerning_rate=1", "unknown key 'training.lerning_rate'"),
        ("training.num_anchor=1", "did you mean 'num_anchors'?"),
        ("trainng.lr=1", "did you mean 'training'?"),
        ("training.lr=fast", "training.lr"),
        ("training.lr=-1", "found -1"),
        ("extraction.layer_ids=[8, 1]", "ascending"),
        ("extraction.layer_ids=[1, 1]", "ascending"),
        ("generation.sampling.max_new_tokens=512", "no room for a prompt"),
        ("drafter.markov_rank=0", "rank 0 goes with head none"),
        ("name=a/b", "one word"),
        ("cache=null", "cache"),
        ("name", "wanted section.key=value"),
        ("name.first=x", "is a value, not a section"),
    ],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("(", r"\(")):
        load_config(DEMO, [override])


def test_overrides_are_yaml() -> None:
    config = load_config(DEMO, ["training.lr=1e-3", "evaluation.temperatures=[0.0]", "prompts.limit=5"])
    assert config.training.lr == 1e-3
    assert config.evaluation.temperatures == (0.0,)
    assert config.prompts.limit == 5


def test_missing_file_bad_yaml_and_duplicate_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(broken)
    broken.write_text("name: a\nname: b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'name' stands twice"):
        load_config(broken)
    broken.write_text("- a\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="wanted a mapping"):
        load_config(broken)


def test_missing_sections_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"key 'target\.path' is missing"):
        load_config(DEMO, ["target={}"])


def test_config_is_immutable() -> None:
    config = load_config(DEMO)
    with pytest.raises(Exception, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]
