"""An exported drafter beside a target: what is refused, what is warned about, what training promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from model.drafter import DSparkDrafter
from model.export import save_drafter
from pipeline.config import Config
from pipeline.drafter_check import TEMPERATURES_KEY, check_drafter, compare_identity, current_identity, expected_tau
from pipeline.errors import ConfigError
from pipeline.identity import check_target
from pipeline.train.recipe import drafter_config


def export(config: Config, **changed: Any) -> Path:
    """Export a drafter whose provenance is the present target's, but for `changed`; returns its folder."""
    identity = {**current_identity(config, check_target(config)), **changed}
    drafter = DSparkDrafter(drafter_config(config)).init_weights(0)
    folder = Path(config.training.output) / "drafter"
    return save_drafter(folder, drafter, {f"cache.{name}": value for name, value in identity.items()})


def test_matching_drafter_passes_silently(make_config: Callable[..., Config]) -> None:
    config = make_config()
    checked = check_drafter(export(config), config, check_target(config))
    assert checked.warnings == ()
    assert checked.config == drafter_config(config)


@pytest.mark.parametrize("field", ["weights", "tokenizer", "chat_template", "chat_template_kwargs", "stop_ids"])
def test_another_target_is_refused_by_field_unless_allowed(field: str, make_config: Callable[..., Config]) -> None:
    config = make_config()
    folder = export(config, **{field: "other"})
    with pytest.raises(ConfigError, match=rf"{field} was other, now .*allow_mismatch"):
        check_drafter(folder, config, check_target(config))
    allowed = make_config(evaluation={"allow_mismatch": True})
    [warning] = check_drafter(folder, allowed, check_target(allowed)).warnings
    assert warning.startswith(f"{field} was other")


@pytest.mark.parametrize("field", ["dtype", "quantization"])
def test_another_precision_is_a_warning(field: str, make_config: Callable[..., Config]) -> None:
    config = make_config()
    [warning] = check_drafter(export(config, **{field: "int4"}), config, check_target(config)).warnings
    assert warning.startswith(f"{field} was int4, now ")


def test_one_character_of_the_template_matters(make_config: Callable[..., Config], tmp_path: Path) -> None:
    import shutil

    config = make_config()
    folder = export(config)
    copy = tmp_path / "target"
    shutil.copytree(config.target.path, copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    changed = make_config(target={"path": str(copy)})
    with pytest.raises(ConfigError, match="chat_template was"):
        check_drafter(folder, changed, check_target(changed))


def test_other_layers_are_named_and_the_drafters_own_are_used(make_config: Callable[..., Config]) -> None:
    config = make_config()
    folder = export(config)
    other = make_config(extraction={"layer_ids": [1, 2]})
    checked = check_drafter(folder, other, check_target(other))
    assert checked.config.target_layer_ids == (0, 2)
    assert "reads layers [0, 2], extraction.layer_ids says [1, 2]" in checked.warnings[0]


def test_missing_or_foreign_drafter_is_one_line(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=r"no exported drafter there; run jobs/train\.py"):
        check_drafter(tmp_path / "nothing", config, check_target(config))
    folder = export(config)
    data = json.loads((folder / "config.json").read_text())
    other = {"vocab_size": 77, "draft_vocab_size": 77, "mask_token_id": 1}
    (folder / "config.json").write_text(json.dumps(data | other))
    with pytest.raises(ConfigError, match="vocab_size 77, the target has 1024"):
        check_drafter(folder, config, check_target(config))
    for broken in ("{", json.dumps(data | {"block_size": None})):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match="not a usable drafter"):
            check_drafter(folder, config, check_target(config))
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "model.safetensors").write_bytes(b"\0" * 7)
    with pytest.raises(ConfigError, match=r"not a usable drafter: .*model\.safetensors: not readable"):
        check_drafter(folder, config, check_target(config))


def test_calibrated_temperatures_come_along_and_must_fit(make_config: Callable[..., Config]) -> None:
    config = make_config()
    folder = export(config)
    assert check_drafter(folder, config, check_target(config)).confidence_temperatures == ()
    data = json.loads((folder / "config.json").read_text())
    fitting = [1.5] * data["block_size"]
    (folder / "config.json").write_text(json.dumps(data | {TEMPERATURES_KEY: fitting}))
    assert check_drafter(folder, config, check_target(config)).confidence_temperatures == tuple(fitting)
    for wrong, message in (([1.5], "1 confidence_temperatures for a block of"), ([-1.0] * 7, "not positive")):
        (folder / "config.json").write_text(json.dumps(data | {TEMPERATURES_KEY: wrong}))
        with pytest.raises(ConfigError, match=message):
            check_drafter(folder, config, check_target(config))


def test_a_copy_of_the_targets_matrices_must_be_the_targets(make_config: Callable[..., Config]) -> None:
    config = make_config()
    folder = export(config)
    weights = folder / "model.safetensors"
    stored, target = load_file(weights), load_file(Path(config.target.path) / "model.safetensors")
    save_file({**stored, "lm_head.weight": target["lm_head.weight"]}, weights)
    assert check_drafter(folder, config, check_target(config)).warnings == ()
    target["lm_head.weight"][5, 5] += 1e-3
    save_file({**stored, "lm_head.weight": target["lm_head.weight"]}, weights)
    with pytest.raises(ConfigError, match=r"lm_head.weight .* is not the target's .* bit for bit"):
        check_drafter(folder, config, check_target(config))


def test_drafter_of_unknown_origin_is_said_to_be_so() -> None:
    refused, warned = compare_identity({"step": 3}, {})
    assert refused == []
    assert "does not say" in warned[0]


def test_expected_tau_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    assert expected_tau(tmp_path) is None
    records = [{"step": step, "tau": 1.0 + step} for step in range(10, 101, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*records, {"step": 101}]))
    assert expected_tau(tmp_path) == (91.0 + 101.0) / 2
