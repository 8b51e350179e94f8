"""Does an exported drafter fit the target it is about to be used with? And what did its training promise?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_store.identity import digest_tokenizer, digest_weights
from model.config import DrafterConfig
from model.decoding.calibration import check_temperatures
from model.errors import CalibrationError, ModelError
from model.export import check_copies, has_copies
from model.layouts import config_from_json
from model.target_heads import load_target_heads
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.identity import CheckedTarget
from pipeline.train.metrics import METRICS, read_metrics

TAIL_SHARE = 0.1
"""Share of the last training steps whose mean is training's expected accepted length."""

TEMPERATURES_KEY = "confidence_temperatures"
"""Key of the drafter's config.json: one temperature per draft position, c_k = σ(logit_k / T_k). Absent: none."""

# What the cache's identity says that changes what the drafter sees or what the target answers.
_REFUSED = ("weights", "tokenizer", "chat_template", "chat_template_kwargs", "stop_ids")
_WARNED = ("dtype", "quantization")
_ABSENT = "<absent>"


@dataclass(frozen=True, slots=True)
class CheckedDrafter:
    """The exported drafter's own configuration, and what differs without being fatal."""

    config: DrafterConfig
    confidence_temperatures: tuple[float, ...]
    """One per draft position; empty when the drafter was not calibrated."""
    warnings: tuple[str, ...]


def check_drafter(folder: Path, config: Config, target: CheckedTarget) -> CheckedDrafter:
    """Compare `<folder>/config.json` and the cache identity in it with the target at hand.

    Raises ConfigError when there is no drafter, when its shape does not fit the target, and, unless
    evaluation.allow_mismatch, when target weights, tokenizer or template are others than those it was trained for or
    its copies of the target's matrices are not the target's.
    """
    file = folder / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        drafter = config_from_json(data, source=str(file))
        temperatures = _temperatures(data, drafter, file)
        copies = has_copies(folder)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: no exported drafter there; run jobs/train.py with this config first") from error
    except (OSError, ValueError, ModelError) as error:
        raise ConfigError(f"{file}: not a usable drafter: {error}") from error
    _check_shape(file, drafter, target)
    provenance = data.get("provenance") or {}
    refused, warned = compare_identity(provenance, current_identity(config, target))
    refused += _foreign_copies(folder, target) if copies else []
    if refused and not config.evaluation.allow_mismatch:
        raise ConfigError(
            f"{file}: the drafter was trained for another target: {'; '.join(refused)}; use the config that "
            "trained it, or set evaluation.allow_mismatch=true to measure it all the same"
        )
    warnings = [*refused, *warned]
    if drafter.target_layer_ids != config.extraction.layer_ids:
        warnings.append(
            f"the drafter reads layers {list(drafter.target_layer_ids)}, extraction.layer_ids says "
            f"{list(config.extraction.layer_ids)}; the drafter's own are used"
        )
    return CheckedDrafter(drafter, temperatures, tuple(warnings))


def _foreign_copies(folder: Path, target: CheckedTarget) -> list[str]:
    try:
        check_copies(folder, load_target_heads(target.folder, dtype=None))
    except ModelError as error:
        return [str(error)]
    return []


def _temperatures(data: dict[str, Any], drafter: DrafterConfig, file: Path) -> tuple[float, ...]:
    if TEMPERATURES_KEY not in data:
        return ()
    temperatures = check_temperatures(data[TEMPERATURES_KEY], source=f"{file}: {TEMPERATURES_KEY}")
    if len(temperatures) != drafter.block_size:
        raise CalibrationError(
            f"{file}: {len(temperatures)} {TEMPERATURES_KEY} for a block of {drafter.block_size} drafts; run "
            "jobs/calibrate_drafter.py"
        )
    return temperatures


def _check_shape(file: Path, drafter: DrafterConfig, target: CheckedTarget) -> None:
    pairs = {
        "hidden_size": (drafter.hidden_size, target.facts["hidden_size"]),
        "vocab_size": (drafter.vocab_size, target.facts["vocab_size"]),
        "num_target_layers": (drafter.num_target_layers, target.facts["num_hidden_layers"]),
    }
    wrong = [f"{name} {mine}, the target has {its}" for name, (mine, its) in pairs.items() if mine != its]
    if wrong:
        raise ConfigError(f"{file}: the drafter does not fit target.path {target.folder}: {'; '.join(wrong)}")


def current_identity(config: Config, target: CheckedTarget) -> dict[str, Any]:
    """What the target at hand says about itself, under the names of the cache's identity."""
    quantization = target.facts.get("quantization_config")
    return {
        "weights": digest_weights(target.folder),
        "tokenizer": digest_tokenizer(target.folder),
        "chat_template": target.template_hash,
        "chat_template_kwargs": json.dumps(config.generation.chat_template_kwargs, sort_keys=True),
        "stop_ids": list(target.stop_ids),
        "dtype": config.target.dtype,
        "quantization": json.dumps(quantization, sort_keys=True) if quantization else None,
    }


def compare_identity(provenance: dict[str, Any], current: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(differences to refuse, differences to warn about) between an export's `cache.*` entries and the present."""
    if not any(name.startswith("cache.") for name in provenance):
        return [], ["the drafter does not say which target and template it was trained for: they were not compared"]

    def differing(names: tuple[str, ...]) -> list[str]:
        pairs = [(name, provenance.get(f"cache.{name}", _ABSENT), current[name]) for name in names]
        return [f"{name} was {_short(old)}, now {_short(new)}" for name, old, new in pairs if old != new]

    return differing(_REFUSED), differing(_WARNED)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


def expected_tau(run: Path) -> float | None:
    """Training's expected accepted length: mean of the records of the last steps, or None without metrics."""
    records = [record for record in read_metrics(run / METRICS) if record.get("tau")]
    if not records:
        return None
    first = records[-1]["step"] * (1 - TAIL_SHARE)
    last = [record["tau"] for record in records if record["step"] >= first]
    return sum(last) / len(last)
