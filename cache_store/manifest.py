"""The small JSON documents of a cache: one record per shard, and the manifest that seals them. Strict both ways."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from cache_store.errors import CacheError
from cache_store.fields import TensorError
from cache_store.schema import FORMAT_VERSION, is_int, parse_versioned

MANIFEST = "manifest.json"
SPEC = "cache.json"
SHARDS, COMMITS, REJECTS, INDEXES = "shards/", "commits/", "rejects/", "index/"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """Where one sample lies in its shard, and what training must know before it reads the states."""

    sample_id: str
    offset: int
    """First byte of the sample in the shard."""
    length: int
    """Bytes of the sample: one contiguous range."""
    tokens: int
    supervised_spans: tuple[tuple[int, int], ...]
    """[start, end) of every run of supervised tokens: the loss mask."""
    checksum: str
    """crc32c of the range, 8 hex digits."""
    finish: str | None
    """Finish reason of the last turn, where the build gave one."""
    domain: str | None
    """Domain of the prompt, where the build gave one."""

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(end - start for start, end in self.supervised_spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A committed shard. Its existence is what makes the shard part of the cache; row i is samples[i]."""

    name: str
    """Object name below the cache's root."""
    format: str
    codec: str
    """Of the captured layers."""
    last_codec: str
    """Of the last hidden state."""
    fingerprint: str
    """Of the settings that the shard was written under."""
    calibration: str | None
    """Digest of the calibration that its codecs used, if they need one."""
    num_samples: int
    num_tokens: int
    num_bytes: int
    footer_bytes: int
    """Parquet: size of the footer at the end of the shard, its 8-byte tail included; tar: 0."""
    checksum: str
    """crc32c of the whole shard, 8 hex digits."""
    errors: tuple[TensorError, ...]
    """Measured by the bounded-loss codecs, one per tensor; empty where all is exact."""
    samples: tuple[SampleRecord, ...]

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "shard record") -> ShardRecord:
        """Read `to_json`'s text. Raises CacheError naming `where` and the field."""
        data, version = parse_versioned(text, where)
        if version == 1:
            data |= {"last_codec": data.get("codec"), "calibration": None, "errors": []}
        errors = _errors(data.pop("errors", None), where)
        raw = data.pop("samples", None)
        if not isinstance(raw, list):
            raise CacheError(f"{where}: samples is {type(raw).__name__}, wanted a list")
        samples = []
        for item in raw:
            spans = item.pop("supervised_spans", None) if isinstance(item, dict) else None
            if version == 1 and isinstance(item, dict):
                item.setdefault("domain", None)
            values = _checked(SampleRecord, item, where, skip=("supervised_spans",))
            samples.append(SampleRecord(supervised_spans=_spans(spans, values["tokens"], where), **values))
        record = cls(samples=tuple(samples), errors=errors, **_checked(cls, data, where, skip=("samples", "errors")))
        totals = (len(samples), sum(sample.tokens for sample in samples))
        if (record.num_samples, record.num_tokens) != totals:
            raise CacheError(
                f"{where}: totals say {record.num_samples} samples and {record.num_tokens} tokens, "
                f"the samples listed make {totals[0]} and {totals[1]}"
            )
        return record


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSummary:
    """A shard's line in the manifest; `used` of its samples are in the index (the others are duplicates)."""

    name: str
    format: str
    codec: str
    last_codec: str
    num_samples: int
    used: int
    num_bytes: int
    footer_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The sealed cache: which shards, which index, and where every input went."""

    fingerprint: str
    num_samples: int
    num_tokens: int
    num_supervised: int
    num_bytes: int
    """Of all shards listed."""
    duplicates: int
    """Samples found in more than one shard (repeated tasks), each read from one of them only."""
    rejected: int
    rejects: dict[str, dict[str, int]]
    """stage -> reason -> count."""
    calibration: str | None
    """Digest of the calibration object, where the codecs need one."""
    errors: tuple[TensorError, ...]
    """Measured by the bounded-loss codecs over all shards, one per tensor; empty where all is exact."""
    index: str
    """Object name of the index of samples."""
    index_checksum: str
    shards: tuple[ShardSummary, ...]

    def to_json(self) -> str:
        """The manifest as JSON text."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST) -> Manifest:
        """Read `to_json`'s text. Raises CacheError naming `where` and the field."""
        data, version = parse_versioned(text, where)
        shards = data.pop("shards", None)
        if not isinstance(shards, list):
            raise CacheError(f"{where}: shards is {type(shards).__name__}, wanted a list")
        if version == 1:
            data |= {"calibration": None, "errors": []}
            shards = [{**item, "last_codec": item.get("codec")} for item in shards if isinstance(item, dict)]
        errors = _errors(data.pop("errors", None), where)
        summaries = tuple(ShardSummary(**_checked(ShardSummary, item, where)) for item in shards)
        return cls(shards=summaries, errors=errors, **_checked(cls, data, where, skip=("shards", "errors")))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: is_int(value) and value >= 0,
    "float": lambda value: isinstance(value, float) and 0 <= value < float("inf"),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "dict[str, dict[str, int]]": lambda value: (
        isinstance(value, dict)
        and all(isinstance(v, dict) and all(is_int(n) for n in v.values()) for v in value.values())
    ),
}


def _checked(cls: Any, data: Any, where: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Constructor arguments of a record class from parsed JSON: exactly its fields, each of its type."""
    if not isinstance(data, dict):
        raise CacheError(f"{where}: found {data!r:.60} where {cls.__name__} was wanted")
    wanted = {field.name: str(field.type) for field in fields(cls) if field.name not in skip}
    if set(data) != set(wanted):
        missing, unknown = sorted(set(wanted) - set(data)), sorted(set(data) - set(wanted))
        raise CacheError(f"{where}: {cls.__name__} lacks fields {missing}, has unknown fields {unknown}")
    for name, kind in wanted.items():
        if not _CHECKS[kind](data[name]):
            raise CacheError(f"{where}: {cls.__name__}.{name} is {data[name]!r:.60}, wanted {kind}")
    return data


def _errors(value: Any, where: str) -> tuple[TensorError, ...]:
    if not isinstance(value, list):
        raise CacheError(f"{where}: errors is {type(value).__name__}, wanted a list")
    return tuple(TensorError(**_checked(TensorError, item, where)) for item in value)


def _spans(value: Any, tokens: int, where: str) -> tuple[tuple[int, int], ...]:
    """Ascending, disjoint, non-empty runs inside the sample."""
    if not isinstance(value, list) or not all(_is_pair(item) for item in value):
        raise CacheError(f"{where}: supervised_spans is {value!r:.60}, wanted a list of [start, end)")
    flat = [edge for span in value for edge in span]
    if any(a >= b for a, b in itertools.pairwise(flat)) or (flat and not 0 <= flat[0] <= flat[-1] <= tokens):
        raise CacheError(f"{where}: supervised_spans {value!r:.60} do not ascend within {tokens} tokens")
    return tuple((start, end) for start, end in value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_int(edge) for edge in value)
