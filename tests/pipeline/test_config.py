from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

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
        ("training.epochs=.inf", "finite number"),
        ("training.lr=[", "override 'training.lr=[': '[' is not valid YAML"),
        ("training.loss={ce: 0, l1: 0}", "one of them must be above 0"),
        ("drafter.num_attention_heads=0", "drafter.num_attention_heads"),
        ("evaluation.temperatures=[-1]", "evaluation.temperatures: wanted 0 (greedy) or more"),
        ("evaluation.temperatures=[1, 1.0]", "each once"),
        ("evaluation.top_k=0", "0 keeps no token; -1 keeps all"),
        ("extraction.layer_ids=[8, 1]", "ascending"),
        ("extraction.layer_ids=[1, 1]", "ascending"),
        ("generation.sampling.max_new_tokens=512", "no room for a prompt"),
        ("drafter.markov_rank=0", "rank 0 goes with head none"),
        ("name=a/b", "one word"),
        ("cache=null", "cache"),
        ("cache.storage.atempts=3", "did you mean 'attempts'?"),
        ("training.data.mix=[{url: x, weigth: 2}]", "did you mean 'weight'?"),
        ("cache.storage.attempts=0", "attempts is 0"),
        ("cache.disk_cache={path: /x}", "key 'cache.disk_cache.max_gb' is missing"),
        ("cache.disk_cache={path: /x, max_gb: 0}", "positive limit"),
        ("name", "wanted section.key=value"),
        ("name.first=x", "is a value, not a section"),
    ],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(DEMO, [override])


def test_overrides_are_yaml() -> None:
    config = load_config(DEMO, ["training.lr=1e-3", "evaluation.temperatures=[0.0]", "prompts.limit=5"])
    assert config.training.lr == 1e-3
    assert config.evaluation.temperatures == (0.0,)
    assert config.prompts.limit == 5
    config = load_config(DEMO, ["generation.chat_template_kwargs.date_string=2024-07-26"])
    assert config.generation.chat_template_kwargs == {"date_string": "2024-07-26"}
    with pytest.raises(ConfigError, match="'ce' stands twice"):
        load_config(DEMO, ["training.loss={ce: 1, ce: 2}"])


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
    broken.write_text("name: a\n? [b]\n: c\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2: found a list, wanted a key"):
        load_config(broken)
    broken.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8: .* at byte 6"):
        load_config(broken)


def test_home_is_what_a_shell_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(DEMO, ["cache.url=~/cache", "prompts.sources=[~/a.jsonl, b~/c]", "training.output=~/run"])
    assert (config.cache.url, config.training.output) == ("/home/somebody/cache", "/home/somebody/run")
    assert config.prompts.sources == ("/home/somebody/a.jsonl", "b~/c")


def test_missing_sections_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"key 'target\.path' is missing"):
        load_config(DEMO, ["target={}"])


def test_config_is_immutable() -> None:
    config = load_config(DEMO)
    with pytest.raises(Exception, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]


def minimal(**drafter: object) -> dict[str, dict[str, object]]:
    """A config with nothing but what has no default."""
    config = yaml.safe_load(DEMO.read_text())
    config["drafter"] = {"mask_token": 5, **drafter}
    config["training"] = {"output": "run"}
    return config


def test_each_kind_of_drafter_fixes_what_its_paper_fixes() -> None:
    kinds = {kind: Config.model_validate(minimal(kind=kind)) for kind in ("dspark", "dflash", "eagle3")}
    losses = {kind: config.training.loss for kind, config in kinds.items()}
    assert (losses["dspark"].ce, losses["dspark"].l1, losses["dspark"].confidence) == (0.1, 0.9, 1.0)
    for kind in ("dflash", "eagle3"):
        assert (losses[kind].ce, losses[kind].l1, losses[kind].confidence) == (1.0, 0.0, 0.0)
        drafter = kinds[kind].drafter
        assert (drafter.markov_head, drafter.markov_rank, drafter.confidence_head) == ("none", 0, False)
    assert [kinds[kind].drafter.num_draft_layers for kind in kinds] == [5, 5, 1]
    steps = np.exp(-np.arange(7) / losses["eagle3"].decay_gamma)
    assert steps == pytest.approx(0.8 ** np.arange(7))
    assert (losses["dspark"].decay_gamma, losses["dflash"].decay_gamma) == (4.0, 4.0)
    for config in kinds.values():  # what was filled in is accepted again
        assert Config.model_validate(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("drafter", "loss", "message"),
    [
        ({"kind": "dflash", "markov_rank": 64}, {}, "drafter.markov_rank is 64, wanted 0"),
        ({"kind": "dflash"}, {"l1": 0.9}, "training.loss.l1 is 0.9, wanted 0.0"),
        ({"kind": "eagle3", "num_draft_layers": 5}, {}, "drafter.num_draft_layers is 5, wanted 1"),
        ({"kind": "eagle3", "confidence_head": True, "sample_from_anchor": False}, {}, "drafter.sample_from_anchor is"),
        ({"kind": "medusa"}, {}, "drafter.kind"),
    ],
)
def test_contradictions_of_a_kind_are_named_with_the_way_out(
    drafter: dict[str, object], loss: dict[str, float], message: str
) -> None:
    config = minimal(**drafter)
    config["training"]["loss"] = loss
    with pytest.raises(ValidationError, match=message) as error:
        Config.model_validate(config)
    if drafter["kind"] != "medusa":
        assert "remove them, or choose kind dspark" in str(error.value)


DOCS = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"


def test_documented_defaults_are_those_of_the_code() -> None:
    kinds = ("dspark", "dflash", "eagle3")
    configs = [Config.model_validate(minimal(kind=kind)) for kind in kinds]
    rows = {
        f"drafter.{name}": [getattr(c.drafter, name) for c in configs] for name in type(configs[0].drafter).model_fields
    }
    rows |= {
        f"training.loss.{name}": [getattr(c.training.loss, name) for c in configs]
        for name in type(configs[0].training.loss).model_fields
    }
    lines = [
        "| " + " | ".join([f"`{name}`", *(_cell(value) for value in values)]) + " |"
        for name, values in rows.items()
        if name not in ("drafter.kind", "drafter.mask_token")
    ]
    table = "\n".join(["| field | dspark | dflash | eagle3 |", "|---|---|---|---|", *lines])
    assert table in DOCS.read_text(encoding="utf-8"), f"docs/drafters.md should hold:\n{table}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "null" if value is None else str(value)
