"""The two kinds of shards by the name that settings and records give them."""

from __future__ import annotations

from pathlib import Path

from cache_store.errors import CacheError
from cache_store.fields import FieldCodecs
from cache_store.parquet_page import read_row_group
from cache_store.parquet_shard import ParquetLayout, ParquetShardWriter
from cache_store.schema import CacheSpec
from cache_store.shard import ShardLayout, ShardWriter, StoredSample
from cache_store.tar_shard import TarLayout, TarShardWriter


def new_shard(folder: Path, stem: str, spec: CacheSpec, codecs: FieldCodecs) -> ShardWriter:
    """A shard to write, as `<folder>/<stem>.<format>`."""
    path = folder / f"{stem}.{spec.format}"
    return TarShardWriter(path, spec, codecs) if spec.format == "tar" else ParquetShardWriter(path, spec, codecs)


def read_alone(form: str, data: bytes | memoryview) -> StoredSample | None:
    """A whole sample from its range without the shard's footer; None: it takes `open_layout`. Raises CacheError."""
    if form == "parquet":
        return read_row_group(data)
    return TarLayout(b"").read(0, 0, data) if form == "tar" else None


def open_layout(form: str, footer: bytes) -> ShardLayout:
    """How to read a shard of a format, from its footer (empty for tar). Raises CacheError."""
    if form == "parquet":
        return ParquetLayout(footer)
    if form == "tar":
        return TarLayout(footer)
    raise CacheError(f"format {form!r} is unknown to this program; it reads parquet and tar")
