"""What a price needs, from a file instead of a cache: a job's YAML config, or a cache.json.

Only the keys that matter here are read; the jobs check the rest of their config.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_store.errors import CacheError
from cache_store.estimate import TokenCounts
from cache_store.schema import DEFAULT_CODEC, DEFAULT_LAST_HIDDEN, DEFAULT_SHARD_MB, CacheSpec

SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """A cache that does not exist yet."""

    spec: CacheSpec
    """Its format, codec and last_hidden are those of the file where it names them."""
    counts: TokenCounts | None
    """From the file's plan; None where it has none."""


def read_planned(path: Path, target_config: Path | None = None) -> PlannedCache:
    """Read a config (`extraction`, `cache`, `plan`, `target`) or a cache.json.

    The target's sizes come from `target_config`, else from <target.path>/config.json, else from plan.target_config.
    Raises CacheError naming the key or file that is missing.
    """
    text = _text(path)
    data = _parse(path, text)
    if "format_version" in data:
        return PlannedCache(CacheSpec.from_json(text), None)
    sizes = _target_sizes(path, data, target_config)
    cache = _section(path, data, "cache")
    named = {name: cache[name] for name in ("format", "codec", "last_codec", "last_hidden") if name in cache}
    spec = CacheSpec(
        layer_ids=tuple(_key(path, _section(path, data, "extraction"), "extraction", "layer_ids")),
        hidden_size=sizes["hidden_size"],
        num_target_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        shard_bytes=int(cache.get("shard_mb", DEFAULT_SHARD_MB)) << 20,
        identity={},  # a price depends on shapes alone
        **{"codec": DEFAULT_CODEC, "last_hidden": DEFAULT_LAST_HIDDEN, **named},
    )
    return PlannedCache(spec, _planned_counts(path, data))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CacheError(f"{path}: cannot read the config: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CacheError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text) if path.suffix == ".json" else _parse_yaml(path, text)
    except ValueError as error:
        raise CacheError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(data, dict):
        raise CacheError(f"{path}: found {type(data).__name__}, wanted a mapping of sections")
    return data


def _parse_yaml(path: Path, text: str) -> Any:
    """Raises ValueError for text that is not YAML."""
    try:
        import yaml
    except ImportError as error:
        raise CacheError(f"{path}: YAML needs the package `pyyaml` (pip install pyyaml); JSON does not") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _section(path: Path, data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name, {})
    if not isinstance(section, dict):
        raise CacheError(f"{path}: {name} is {section!r:.40}, wanted a section")
    return section


def _key(path: Path, section: dict[str, Any], name: str, key: str) -> Any:
    if key not in section:
        raise CacheError(f"{path}: key {name}.{key} is missing; a price depends on it")
    return section[key]


def _target_sizes(path: Path, data: dict[str, Any], target_config: Path | None) -> dict[str, Any]:
    target, plan = _section(path, data, "target"), _section(path, data, "plan")
    named = [Path(str(target["path"])) / "config.json"] if "path" in target else []
    named += [Path(str(plan["target_config"]))] if plan.get("target_config") else []
    file = target_config or next((candidate for candidate in named if candidate.is_file()), None)
    if file is None:
        looked = ", ".join(map(str, named)) or "nowhere"
        raise CacheError(f"{path}: the target's config.json is not on this machine ({looked}); give --target-config")
    facts = _parse(file, _text(file))
    facts = {**facts, **facts.get("text_config", {})}
    return {name: _key(file, facts, "config", name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}


def _planned_counts(path: Path, data: dict[str, Any]) -> TokenCounts | None:
    """Samples times mean lengths, cut at max_length; None without plan.samples and plan.response_tokens."""
    plan = _section(path, data, "plan")
    if not plan.get("samples") or not plan.get("response_tokens") or not plan.get("prompt_tokens"):
        return None
    response = float(plan["response_tokens"])
    per_sample = float(plan["prompt_tokens"]) + response
    if data.get("max_length"):
        per_sample = min(per_sample, float(data["max_length"]))
    samples = int(plan["samples"])
    tokens = round(samples * per_sample)
    return TokenCounts(samples=samples, tokens=tokens, supervised=round(samples * min(response, per_sample)))
