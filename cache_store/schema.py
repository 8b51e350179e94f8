"""What a Target Cache holds: one sample, and the settings that all samples of a cache share.

bf16 has no NumPy type: everywhere in this package bf16 values are their 16 bits, in uint16 arrays.
Legend: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from cache_store.errors import CacheError

FORMAT_VERSION = 1
FORMATS = ("parquet",)
CODECS = ("bss1", "raw")
LAST_HIDDEN = ("needed", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSample:
    """One conversation row with the target's states for exactly its tokens."""

    sample_id: str
    input_ids: np.ndarray
    """int32 [T]: the engine's own token ids."""
    loss_mask: np.ndarray
    """bool [T]: True at tokens that the target generated."""
    hidden_states: np.ndarray
    """uint16 (bf16 bits) [L, T, D]: outputs of the captured decoder layers, ascending."""
    last_hidden_state: np.ndarray
    """uint16 (bf16 bits) [T, D]: after the final norm; row i predicts token i+1; zero rows where not stored."""
    metadata: dict[str, Any]
    """JSON: domain, finish_reasons per turn, and whatever else the build knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """The settings of a cache, written once into cache.json; a build with other settings is refused."""

    layer_ids: tuple[int, ...]
    """0-based ids of the decoder layers whose OUTPUT is stored (-1: the embedding's), ascending, never the last."""
    hidden_size: int
    num_target_layers: int
    vocab_size: int
    format: str = "parquet"
    codec: str
    """bss1: bytes split into two planes, the high one compressed; raw: bf16 bytes as they are. Both exact."""
    last_hidden: str
    """needed: the last hidden state only at positions whose next token is supervised; all: at every position."""
    shard_bytes: int
    """A shard is closed once it is at least this large."""
    identity: dict[str, Any]
    """Flat JSON: what else makes two caches the same (weights, tokenizer, template, sampling, prompts, versions)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        problems = [problem for problem in _problems(self) if problem]
        if problems:
            raise CacheError("cache settings: " + "; ".join(problems))

    @property
    def num_layers(self) -> int:
        """Captured layers, L."""
        return len(self.layer_ids)

    def to_json(self) -> str:
        """The settings as JSON text, keys in a fixed order."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> CacheSpec:
        """Read `to_json`'s text; unknown, missing or wrongly typed fields raise CacheError."""
        data = parse_versioned(text, "cache.json")
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            raise CacheError(
                f"cache.json: missing fields {sorted(names - set(data))}, unknown fields {sorted(set(data) - names)}"
            )
        if not isinstance(data["layer_ids"], list):
            raise CacheError(f"cache.json: layer_ids is {data['layer_ids']!r}, wanted a list")
        return cls(**data)


def parse_versioned(text: str | bytes, where: str) -> dict[str, Any]:
    """The fields of one of the format's JSON objects, without its format_version.

    Raises CacheError naming `where` for broken JSON, anything but an object, and another version.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CacheError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CacheError(f"{where}: found {type(data).__name__}, wanted an object")
    version = data.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CacheError(f"{where}: format_version {version!r}, this program reads {FORMAT_VERSION}")
    return data


def _problems(spec: CacheSpec) -> list[str]:
    layers = spec.layer_ids
    problems = [
        f"{name} is {value!r}, wanted a positive integer"
        for name in ("hidden_size", "num_target_layers", "vocab_size", "shard_bytes")
        if not is_int(value := getattr(spec, name)) or value <= 0
    ]
    problems += [
        f"{name} is {value!r}, wanted one of {', '.join(allowed)}"
        for name, allowed in (("format", FORMATS), ("codec", CODECS), ("last_hidden", LAST_HIDDEN))
        if (value := getattr(spec, name)) not in allowed
    ]
    if not layers or not all(is_int(k) for k in layers) or list(layers) != sorted(set(layers)):
        problems.append(f"layer_ids is {list(layers)}, wanted ascending layer ids without repeats")
    elif not problems and not (layers[0] >= -1 and layers[-1] < spec.num_target_layers - 1):
        problems.append(
            f"layer_ids {list(layers)} must lie within -1..{spec.num_target_layers - 2}: the target has "
            f"{spec.num_target_layers} layers and the last one is not a captured layer"
        )
    if not isinstance(spec.identity, dict) or not all(isinstance(key, str) for key in spec.identity):
        problems.append(f"identity is {type(spec.identity).__name__}, wanted an object with string keys")
        return problems
    for key, value in spec.identity.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(f"identity.{key} is not JSON: {error}")
    return problems


def is_int(value: object) -> bool:
    """A real integer: bool is an int to Python, not to a file format."""
    return isinstance(value, int) and not isinstance(value, bool)
