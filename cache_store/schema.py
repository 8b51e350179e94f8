"""What a Target Cache holds: one sample, and the settings that all samples of a cache share.

bf16 has no NumPy type: everywhere in this package bf16 values are their 16 bits, in uint16 arrays.
Legend: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np

from cache_store.errors import CacheError

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
FORMATS = ("parquet", "tar")
EXACT_CODECS = ("bss1", "raw")
CODECS = (*EXACT_CODECS, "i8cr", "f8r")
LAST_CODECS = (*EXACT_CODECS, "i8cr")
"""f8r is for captured layers alone: the last hidden state feeds a softmax, which asks for more than 2 % precision."""
CALIBRATED = ("i8cr",)
MAX_CHANNELS = (1 << 16) - 1
"""Bounded-loss codecs name and count channels in 16 bits."""
LAST_HIDDEN = ("needed", "all")
DEFAULT_FORMAT: Final = "parquet"
DEFAULT_CODEC: Final = "bss1"
DEFAULT_LAST_HIDDEN: Final = "needed"
DEFAULT_SHARD_MB: Final = 256


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
    format: str = DEFAULT_FORMAT
    """parquet, or tar (WebDataset)."""
    codec: str
    """Of the captured layers. bss1: bytes split into two planes, the high one compressed; raw: bf16 bytes as they are;
    both exact. i8cr: int8 over calibrated channels, at most 1 % error in any row; f8r: fp8 e4m3, at most 4 %."""
    last_codec: str = ""
    """Of the last hidden state. Empty: exact (the captured layers' codec if that is exact, else bss1)."""
    last_hidden: str
    """needed: the last hidden state only at positions whose next token is supervised; all: at every position."""
    shard_bytes: int
    """A shard is closed once it is at least this large."""
    identity: dict[str, Any]
    """Flat JSON: what else makes two caches the same (weights, tokenizer, template, sampling, prompts, versions)."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if not self.last_codec:
            object.__setattr__(self, "last_codec", self.codec if self.codec in EXACT_CODECS else "bss1")
        problems = [problem for problem in _problems(self) if problem]
        if problems:
            raise CacheError("cache settings: " + "; ".join(problems))

    @property
    def num_layers(self) -> int:
        """Captured layers, L."""
        return len(self.layer_ids)

    @property
    def calibrated(self) -> bool:
        """Whether a field's codec needs the calibration object (`calibration.py`)."""
        return self.codec in CALIBRATED or self.last_codec in CALIBRATED

    def settings(self) -> dict[str, Any]:
        """The fields that cache.json of this version has, without the version itself; what the fingerprint covers."""
        values = asdict(self)
        if values.pop("format_version") == 1:
            del values["last_codec"]
        return values

    def to_json(self) -> str:
        """The settings as JSON text, keys in a fixed order."""
        return (
            json.dumps({"format_version": self.format_version, **self.settings()}, indent=1, ensure_ascii=False) + "\n"
        )

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "cache.json") -> CacheSpec:
        """Read `to_json`'s text; unknown, missing or wrongly typed fields raise CacheError that names `where`."""
        data, version = parse_versioned(text, where)
        names = {field.name for field in fields(cls)} - {"format_version"}
        if version == 1:
            data.setdefault("last_codec", data.get("codec"))
        if set(data) != names:
            raise CacheError(
                f"{where}: missing fields {sorted(names - set(data))}, unknown fields {sorted(set(data) - names)}"
            )
        if not isinstance(data["layer_ids"], list):
            raise CacheError(f"{where}: layer_ids is {data['layer_ids']!r}, wanted a list")
        try:
            return cls(**data, format_version=version)
        except CacheError as error:
            raise CacheError(f"{where}: {error}") from error


def parse_versioned(text: str | bytes, where: str) -> tuple[dict[str, Any], int]:
    """The fields of one of the format's JSON objects without its format_version, and that version.

    Raises CacheError naming `where` for broken JSON, anything but an object, and another version.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CacheError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CacheError(f"{where}: found {type(data).__name__}, wanted an object")
    version = data.pop("format_version", None)
    if not is_int(version) or version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise CacheError(f"{where}: format_version {version!r}, this program reads {readable}")
    return data, version


def _problems(spec: CacheSpec) -> list[str]:
    layers = spec.layer_ids
    problems = [
        f"{name} is {value!r}, wanted a positive integer"
        for name in ("hidden_size", "num_target_layers", "vocab_size", "shard_bytes")
        if not is_int(value := getattr(spec, name)) or value <= 0
    ]
    problems += [
        f"{name} is {value!r}, wanted one of {', '.join(map(str, allowed))}"
        for name, allowed in (
            ("format_version", READABLE_VERSIONS),
            ("format", FORMATS),
            ("codec", CODECS),
            ("last_codec", LAST_CODECS),
            ("last_hidden", LAST_HIDDEN),
        )
        if (value := getattr(spec, name)) not in allowed
    ]
    if not layers or not all(is_int(k) for k in layers) or list(layers) != sorted(set(layers)):
        problems.append(f"layer_ids is {list(layers)}, wanted ascending layer ids without repeats")
    elif not problems and not (layers[0] >= -1 and layers[-1] < spec.num_target_layers - 1):
        problems.append(
            f"layer_ids {list(layers)} must lie within -1..{spec.num_target_layers - 2}: the target has "
            f"{spec.num_target_layers} layers and the last one is not a captured layer"
        )
    problems += [
        f"hidden_size is {spec.hidden_size}, codec {name} counts channels up to {MAX_CHANNELS}"
        for name in (spec.codec, spec.last_codec)
        if name not in EXACT_CODECS and not problems and spec.hidden_size > MAX_CHANNELS
    ]
    if spec.format_version == 1 and (spec.format != "parquet" or spec.last_codec != spec.codec or spec.calibrated):
        problems.append("format_version 1 has only parquet shards and one exact codec for both fields")
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
