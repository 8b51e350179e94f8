"""The sections of a job's configuration about the Target Cache: where it is, how it is read, what of it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cache_store.disk_cache import DiskCacheOptions
from cache_store.retry import StorageOptions
from cache_store.schema import DEFAULT_CODEC, DEFAULT_FORMAT, DEFAULT_LAST_HIDDEN, DEFAULT_SHARD_MB
from pipeline.config_section import Section


class CacheSection(Section):
    """The Target Cache that `build_cache` writes and `train` reads."""

    url: str
    """Local folder or s3://bucket/prefix."""
    endpoint_url: str | None = None
    """S3 endpoint; credentials come by the usual means (environment, profile, instance role)."""
    format: Literal["parquet", "tar"] = DEFAULT_FORMAT
    """Container of the shards: Parquet, or tar as WebDataset has it."""
    codec: Literal["bss1", "raw", "i8cr", "f8r"] = DEFAULT_CODEC
    """Of the captured layers. bss1, raw: exact; i8cr: int8, at most 1 % error in any row; f8r: fp8, at most 4 %."""
    last_codec: Literal["bss1", "raw", "i8cr"] | None = None
    """Of the last hidden state. null: exact, whatever the captured layers' codec."""
    last_hidden: Literal["needed", "all"] = DEFAULT_LAST_HIDDEN
    """Store the last hidden state only where the loss can use it, or at every position."""
    shard_mb: int = Field(default=DEFAULT_SHARD_MB, gt=0)
    verify: Literal["always", "first", "never"] = "first"
    """When a reader checks a sample's checksum."""
    exclusions: str | None = None
    """Damaged samples that training does without: the list that `cache_store repair --exclude` has written and named.
    null: training stops at a damaged sample."""
    disk_cache: DiskCacheOptions | None = None
    """Keep what training reads on a local disk of each machine: {path, max_gb}. null: off."""
    storage: StorageOptions = StorageOptions()
    """Patience with a bucket: attempts, timeouts, the floor on throughput, connections."""
    ignore_free_space: bool = False


class MixedCache(Section):
    """A further cache to train on, built from the same target with the same layers."""

    url: str
    endpoint_url: str | None = None
    weight: float = Field(default=1.0, gt=0)
    """How often each of its samples stands in an epoch: 2 twice; 0.5 in every second epoch."""
    domains: tuple[str, ...] = ()
    masks: str = "stored"
    exclusions: str | None = None


class DataSection(Section):
    """Which samples of the cache train, and how rows are made of them. All choices are pure functions of sample ids."""

    held_out_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of conversations, chosen by a hash of their ids, that training never sees (of every cache)."""
    held_out_samples: int = Field(default=256, gt=0)
    """Of those, how many are measured with every checkpoint: metrics held_out_loss, held_out_tau, ..."""
    sample_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the remaining conversations to train on; a smaller share is a subset of a larger one."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Leave longer samples out; null: they are cut to training.max_length."""
    domains: tuple[str, ...] = ()
    """Only these domains of cache.url; empty: all."""
    masks: str = "stored"
    """Supervised tokens of cache.url: stored, last_turn, first_turn, or a table made by cache_store.masks."""
    weight: float = Field(default=1.0, gt=0)
    """How often each sample of cache.url stands in an epoch."""
    mix: tuple[MixedCache, ...] = ()
    """Further caches."""
    pack: bool = False
    """Fill rows of training.max_length tokens with several samples each, instead of padding every sample."""
