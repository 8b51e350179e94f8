"""Writing a cache: the settings once, then samples into shards, each committed by a record.

Commit protocol: write to a temporary file, close, read back and check, publish the shard, check its size there, then
put its record. A crash before the record leaves garbage that no reader believes; after it, a committed shard.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from types import TracebackType

import numpy as np

from cache_store import codec, identity
from cache_store.calibration import digest_of, field_codecs, load_calibration
from cache_store.containers import new_shard
from cache_store.errors import AlreadyExists, CacheMismatch, NotFound, SampleRejected, StorageError
from cache_store.manifest import COMMITS, SHARDS, SPEC, ShardRecord
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import CopiedFields, ShardWriter
from cache_store.storage import FREE_SPACE, Storage


def create_cache(storage: Storage, spec: CacheSpec) -> CacheSpec:
    """Write cache.json if there is none, else compare with it; returns the settings.

    Raises CacheMismatch naming every field that differs, with both values; StorageError.
    """
    try:
        if not storage.exists(SPEC):
            _refuse_other_records(storage, spec)
            storage.put(SPEC, spec.to_json().encode(), if_absent=True)
            return spec
        found = load_spec(storage)
    except AlreadyExists:
        found = load_spec(storage)
    _refuse_other_settings(storage, found, spec)
    return found


def check_settings(storage: Storage, spec: CacheSpec) -> None:
    """What `create_cache` would refuse, without writing anything. Raises CacheMismatch, StorageError."""
    if storage.exists(SPEC):
        _refuse_other_settings(storage, load_spec(storage), spec)


def _refuse_other_settings(storage: Storage, found: CacheSpec, spec: CacheSpec) -> None:
    differing = identity.differences(found, spec)
    if differing:
        listed = "; ".join(f"{name}: cache has {a!r}, this run wants {b!r}" for name, a, b in differing)
        raise CacheMismatch(
            f"{storage.url} was made with other settings: {listed}. Use another cache.url, or restore the settings"
        )


def _refuse_other_records(storage: Storage, spec: CacheSpec) -> None:
    """A cache that has lost its cache.json takes only the same settings again."""
    for info in storage.list(COMMITS)[:1]:
        record = ShardRecord.from_json(storage.read(info.name), storage.path(info.name))
        if record.fingerprint != identity.fingerprint(spec):
            raise CacheMismatch(
                f"{storage.url} has lost its {SPEC}, and its shards were written under other settings "
                f"({record.fingerprint[:12]}, this run has {identity.fingerprint(spec)[:12]}); use the config that "
                "built it, or another cache.url"
            )


def load_spec(storage: Storage) -> CacheSpec:
    """The settings of an existing cache. Raises NotFound when there is no cache, CacheError when it is unreadable."""
    try:
        content = storage.read(SPEC)
    except NotFound as error:
        raise NotFound(
            f"{storage.url} holds no Target Cache (no {SPEC}); build one with jobs/build_cache.py"
        ) from error
    return CacheSpec.from_json(content, storage.path(SPEC))


class CacheWriter:
    """Rolls samples into shards of about `spec.shard_bytes`. One per process; any number may write at once.

    A context manager: leaving it commits the open shard, an exception inside discards the open shard (committed ones
    stay). At most one uncommitted shard lies in `scratch_dir` at any time. Raises CacheIncomplete when the codecs need
    channel scales that the cache does not have yet.
    """

    def __init__(self, storage: Storage, spec: CacheSpec, *, scratch_dir: Path | None = None) -> None:
        self.storage, self.spec = storage, spec
        self.committed: list[ShardRecord] = []
        self._scratch_dir = scratch_dir
        self._fingerprint = identity.fingerprint(spec)
        calibration = load_calibration(storage, spec)
        self._codecs, self._calibration = field_codecs(spec, calibration), digest_of(calibration)
        self._open: ShardWriter | None = None
        self._ids: set[str] = set()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def write(self, sample: TargetSample, copied: CopiedFields | None = None) -> None:
        """Add one sample; commits the shard when it is full. `copied` fields are stored as they are.

        Raises SampleRejected (the writer stays usable); StorageError or anything else drops the open shard.
        """
        check_sample(self.spec, sample)
        if sample.sample_id in self._ids:
            raise SampleRejected(sample.sample_id, "this writer has written the same sample_id before")
        try:
            if self._open is None:
                self._open = self._new_shard()
            self._open.add(sample, copied)
            full = self._open.tell() >= self.spec.shard_bytes
        except SampleRejected:
            raise  # before a byte of it was written
        except OSError as error:
            self.abandon()
            raise self._disk_error(error) from error
        except BaseException:  # the container may hold half a sample
            self.abandon()
            raise
        self._ids.add(sample.sample_id)
        if full:
            self._commit()

    def close(self) -> list[ShardRecord]:
        """Commit the open shard, if any sample is in it; returns all records of this writer."""
        self._commit()
        return self.committed

    def abandon(self) -> None:
        """Discard the open shard; its samples may be written again."""
        if self._open is not None:
            self._ids.difference_update(self._open.ids)
            self._open.abandon()
            self._open = None

    def _new_shard(self) -> ShardWriter:
        folder = self._scratch_dir if self._scratch_dir is not None else self.storage.scratch_dir()
        folder.mkdir(parents=True, exist_ok=True)
        # Random, so that a repeated task never touches what its first try left behind.
        return new_shard(folder, f"part-{uuid.uuid4().hex}", self.spec, self._codecs)

    def _commit(self) -> None:
        shard = self._open
        if shard is None:
            return
        if not shard.ids:
            self.abandon()
            return
        try:
            num_bytes, footer_bytes, crc, samples = shard.finish()
            name = SHARDS + shard.path.name
            self.storage.put(name, shard.path)
            if (found := self.storage.size(name)) != num_bytes:
                raise StorageError(f"{self.storage.path(name)}: {found} bytes arrived of {num_bytes}")
            record = ShardRecord(
                name=name,
                format=self.spec.format,
                codec=self.spec.codec,
                last_codec=self.spec.last_codec,
                fingerprint=self._fingerprint,
                calibration=self._calibration,
                num_samples=len(samples),
                num_tokens=sum(sample.tokens for sample in samples),
                num_bytes=num_bytes,
                footer_bytes=footer_bytes,
                checksum=crc,
                errors=shard.errors(),
                samples=samples,
            )
            self._put_record(record)
        except OSError as error:
            self.abandon()
            raise self._disk_error(error) from error
        except BaseException:
            self.abandon()
            raise
        self._open = None
        self.committed.append(record)

    def _put_record(self, record: ShardRecord) -> None:
        name, content = record_name(record.name), record.to_json().encode()
        try:
            self.storage.put(name, content, if_absent=True)
        except AlreadyExists:
            if self.storage.read(name) != content:  # else our own put, whose answer was lost and which was retried
                raise

    def _disk_error(self, error: OSError) -> StorageError:
        folder = self._scratch_dir or self.storage.scratch_dir()
        return StorageError(f"{folder}: cannot write a shard: {error.strerror or error}; {FREE_SPACE}")


def record_name(shard_name: str) -> str:
    """Name of the record of a shard."""
    return f"{COMMITS}{shard_name.removeprefix(SHARDS).rpartition('.')[0]}.json"


def check_sample(spec: CacheSpec, sample: TargetSample) -> None:
    """Raise SampleRejected unless the sample has the cache's shapes and dtypes, finite states and supervision."""
    problem = _problem(spec, sample)
    if problem:
        raise SampleRejected(sample.sample_id, problem)


def _problem(spec: CacheSpec, sample: TargetSample) -> str | None:
    tokens = len(sample.input_ids)
    if not sample.sample_id or tokens == 0:
        return "no tokens" if sample.sample_id else "sample_id is empty"
    return _shape_problem(spec, sample, tokens) or _value_problem(spec, sample, tokens)


def _shape_problem(spec: CacheSpec, sample: TargetSample, tokens: int) -> str | None:
    wanted: dict[str, tuple[tuple[int, ...], type]] = {
        "input_ids": ((tokens,), np.int32),
        "loss_mask": ((tokens,), np.bool_),
        "hidden_states": ((spec.num_layers, tokens, spec.hidden_size), np.uint16),
        "last_hidden_state": ((tokens, spec.hidden_size), np.uint16),
    }
    for name, (shape, dtype) in wanted.items():
        array = getattr(sample, name)
        if array.shape != shape or array.dtype != dtype:
            return f"{name} is {array.dtype} {list(array.shape)}, wanted {np.dtype(dtype).name} {list(shape)}"
    return None


def _value_problem(spec: CacheSpec, sample: TargetSample, tokens: int) -> str | None:
    lowest, highest = int(sample.input_ids.min()), int(sample.input_ids.max())
    if lowest < 0 or highest >= spec.vocab_size:
        return f"token id {lowest if lowest < 0 else highest} outside the vocabulary of {spec.vocab_size}"
    if not sample.loss_mask.any():
        return f"none of its {tokens} tokens is supervised"
    for name in ("hidden_states", "last_hidden_state"):
        if bad := codec.count_nonfinite(getattr(sample, name)):
            return f"{name} has {bad} infinite or NaN values"
    try:
        json.dumps(sample.metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"metadata is not JSON: {error}"
    return None
