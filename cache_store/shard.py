"""What the two containers share: a sample on its way into a shard, and as it comes out of one.

Legend: T tokens, L captured layers, P stored last hidden states, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import crc32c
import numpy as np

from cache_store.errors import CacheError
from cache_store.fields import FieldCodec, FieldCodecs, Planes, StoredPlanes, TensorError, tensor_errors
from cache_store.manifest import SampleRecord
from cache_store.schema import CacheSpec, TargetSample

PLANES = ("cap_hi", "cap_lo", "last_hi", "last_lo")
"""Captured layers and last hidden state, each a plane for zstd (`hi`) and a plane stored as it is (`lo`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """A sample's bytes, the same for both containers."""

    sample_id: str
    metadata: dict[str, Any]
    input_ids: np.ndarray
    """int32 [T], little-endian."""
    loss_mask: np.ndarray
    """uint8 [T], 0 or 1."""
    planes: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    """In the order of PLANES, uint8, uncompressed."""
    errors: tuple[TensorError, ...]

    def record(self, offset: int, data: Any) -> SampleRecord:
        """The sample's line in its shard's record, once its bytes `data` lie at `offset`."""
        finish, domain = indexed_metadata(self.metadata)
        return SampleRecord(
            sample_id=self.sample_id,
            offset=offset,
            length=len(data),
            tokens=len(self.loss_mask),
            supervised_spans=supervised_spans(self.loss_mask),
            checksum=checksum(data),
            finish=finish,
            domain=domain,
        )

    def without_planes(self) -> EncodedSample:
        """The same sample's facts, for the record, without its bulk."""
        nothing = np.empty(0, np.uint8)
        return EncodedSample(
            sample_id=self.sample_id,
            metadata=self.metadata,
            input_ids=nothing.view("<i4"),
            loss_mask=self.loss_mask,
            planes=(nothing, nothing, nothing, nothing),
            errors=self.errors,
        )


CopiedField = tuple[Planes, tuple[TensorError, ...]]
"""A field's planes from another shard, with what was measured on them when they were made."""


@dataclass(frozen=True, slots=True)
class CopiedFields:
    """Fields that go into a shard as another one holds them: coding lossy states again would add to their error."""

    captured: CopiedField | None = None
    last: CopiedField | None = None


def encode_sample(
    spec: CacheSpec, codecs: FieldCodecs, sample: TargetSample, copied: CopiedFields | None = None
) -> EncodedSample:
    """Encode a sample, already validated, by the codecs of its cache, but for fields that are copied."""
    last = sample.last_hidden_state
    if spec.last_hidden == "needed":
        last = last[needed_positions(sample.loss_mask)]
    given = copied or CopiedFields()
    layers = [str(layer) for layer in spec.layer_ids]
    captured_planes, captured_errors = given.captured or _encode(codecs.captured, sample.hidden_states, layers)
    last_planes, last_errors = given.last or _encode(codecs.last, last[None], ["last"])
    return EncodedSample(
        sample_id=sample.sample_id,
        metadata=sample.metadata,
        input_ids=np.ascontiguousarray(sample.input_ids, dtype="<i4"),
        loss_mask=sample.loss_mask.astype(np.uint8),
        planes=(*captured_planes, *last_planes),
        errors=captured_errors + last_errors,
    )


def _encode(field: FieldCodec, bits_GRD: np.ndarray, names: list[str]) -> CopiedField:
    planes, errors = field.encode(bits_GRD)
    return planes, () if errors is None else tensor_errors(names, errors)


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample as stored: tokens decoded, states not decoded yet."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    metadata: dict[str, Any]
    captured: StoredPlanes
    last: StoredPlanes


class ShardWriter(Protocol):
    """One shard being written into a local file; nobody may read it before `finish`."""

    path: Path
    ids: list[str]

    def add(self, sample: TargetSample, copied: CopiedFields | None = None) -> None:
        """Append one sample, already validated. Raises SampleRejected when the container cannot hold it."""

    def tell(self) -> int:
        """Bytes written so far."""

    def finish(self) -> tuple[int, int, str, tuple[SampleRecord, ...]]:
        """Close, read the file back and check it: (bytes, footer bytes, crc32c, one record per sample)."""

    def abandon(self) -> None:
        """Drop the unfinished file."""

    def errors(self) -> tuple[TensorError, ...]:
        """What the codecs measured, one entry per tensor."""


class TextCut(CacheError):
    """A text range was too short for an unusually long text: read the whole sample instead."""


class ShardLayout(Protocol):
    """How to read the samples of one finished shard from their byte ranges."""

    def text_range(self, row: int, where: tuple[int, int], tokens: int) -> tuple[int, int]:
        """(offset, length) that holds id, metadata, tokens and mask of the sample at `where` (offset, length)."""

    def read(self, row: int, offset: int, data: bytes | memoryview, *, states: bool = True) -> StoredSample:
        """Decode a sample from its byte range (without states: its text range). Raises CacheError, TextCut."""

    def problems(self, spec: CacheSpec, content: memoryview, ranges: list[tuple[int, int]]) -> list[tuple[str, str]]:
        """(kind, detail) of what in the whole shard's structure does not fit the settings and the record's ranges."""


def checksum(data: Any) -> str:
    """crc32c of a buffer, 8 hex digits."""
    return f"{crc32c.crc32c(data):08x}"


def needed_positions(loss_mask: np.ndarray) -> np.ndarray:
    """Positions whose next token is supervised, ascending: where the loss can use the last hidden state."""
    return np.flatnonzero(loss_mask[1:])


def supervised_spans(loss_mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """[start, end) of every run of True."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def indexed_metadata(metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """What the index repeats of a sample's metadata: (finish reason of the last turn, domain), None where not given."""
    reasons, domain = metadata.get("finish_reasons"), metadata.get("domain")
    last = reasons[-1] if isinstance(reasons, list) and reasons else None
    return (last if isinstance(last, str) else None), (domain if isinstance(domain, str) else None)


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Metadata as stored."""
    return json.dumps(metadata, ensure_ascii=False)
