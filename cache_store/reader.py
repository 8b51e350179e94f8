"""Reading a cache: any sample by position or id with one ranged read, checked against its record.

Legend: T tokens, L captured layers, D hidden size.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import numpy as np
import pyarrow as pa

from cache_store import codec, index
from cache_store.calibration import digest_of, field_codecs, load_calibration
from cache_store.containers import open_layout, read_alone
from cache_store.disk_cache import DiskCache, DiskCacheOptions
from cache_store.errors import (
    CacheError,
    CacheIncomplete,
    CacheMismatch,
    NotFound,
    ObjectEndsEarly,
    ShardCorrupt,
    StorageError,
)
from cache_store.exclusions import excluded_rows, load_exclusions
from cache_store.identity import fingerprint
from cache_store.ledger import Ledger, summaries
from cache_store.manifest import MANIFEST, Manifest, ShardSummary
from cache_store.masks import Spans, apply_masks
from cache_store.schema import TargetSample
from cache_store.shard import ShardLayout, StoredSample, TextCut, checksum, needed_positions
from cache_store.storage import Storage
from cache_store.writer import load_spec

Verify = Literal["always", "first", "never"]
READ_MEMORY = 1 << 24
"""Largest stored sample that is read into memory which a thread keeps: fresh memory costs more than filling it."""
LAYOUTS_KEPT = 1024
"""Parsed footers of shards held in memory, least recently used dropped first."""


Memory = Callable[[int], memoryview]
_local = threading.local()


def _memory_of_thread(length: int) -> memoryview:
    """`length` bytes of this thread's, valid until it asks again."""
    kept = getattr(_local, "memory", b"")
    if len(kept) < length:
        kept = _local.memory = bytearray(1 << (length - 1).bit_length())
    return memoryview(kept)[:length]


class CacheReader:
    """Samples of a sealed cache, in the order of their ids; safe to use from several threads.

    verify: check a sample's checksum and that its states are finite `always`, the `first` time that this reader
    reads it, or `never`. allow_unsealed: read the shards committed so far of a build in progress. masks: the loss
    masks as `stored`, or others (`masks.py`). exclusions: name of a list of damaged samples, which this reader refuses
    and `SampleSet` does without (`exclusions.py`). disk_cache: keep what is read on a local disk.
    A damaged sample is read once more before ShardCorrupt names it.
    Raises NotFound (no cache here), CacheIncomplete (not sealed), CacheMismatch, ShardCorrupt (damaged index).
    """

    def __init__(
        self,
        storage: Storage,
        *,
        verify: Verify = "first",
        allow_unsealed: bool = False,
        masks: str = "stored",
        exclusions: str | None = None,
        disk_cache: DiskCacheOptions | None = None,
    ) -> None:
        if verify not in ("always", "first", "never"):
            raise CacheError(f"verify is {verify!r}, wanted always, first or never")
        self.storage, self.verify, self.masks = storage, verify, masks
        self.spec = load_spec(storage)
        calibration = load_calibration(storage, self.spec, empty=True)
        self.codecs = field_codecs(self.spec, calibration)
        self._calibration = digest_of(calibration)
        self.manifest: Manifest | None = None
        self.shards: tuple[ShardSummary, ...]
        self.index: pa.Table
        self._open_index(allow_unsealed)
        self.index = apply_masks(self.index, masks, self.spec, storage)
        self.tokens: np.ndarray = index.column(self.index, "tokens").astype(np.int64)
        self.supervised_tokens: np.ndarray = index.column(self.index, "supervised").astype(np.int64)
        names = ("shard", "row", "offset", "length", "checksum")
        self._where = {name: index.column(self.index, name) for name in names}
        self.lengths: np.ndarray = self._where["length"]
        """int64 [n]: stored bytes of every sample."""
        listed = load_exclusions(storage, exclusions) if exclusions is not None else ()
        self.excluded: np.ndarray = excluded_rows(self.index, self.shards, listed)
        """bool [n]: samples that the list of exclusions names."""
        if disk_cache is not None:
            disk_cache.check(int(self.lengths.max(initial=0)))
        self._disk_options = disk_cache
        self._disk_cache: DiskCache | None = None
        self._checked = np.zeros(len(self.tokens), dtype=bool)
        self._sample_ids = self.index["sample_id"].combine_chunks()
        self._spans = Spans.from_column(self.index["spans"])
        self._ids: list[str] | None = None
        self._positions: dict[str, int] | None = None
        self._layouts: OrderedDict[int, ShardLayout] = OrderedDict()
        self._lock = threading.Lock()

    def _open_index(self, allow_unsealed: bool) -> None:
        try:
            self.manifest = Manifest.from_json(self.storage.read(MANIFEST), self.storage.path(MANIFEST))
        except NotFound as error:
            if not allow_unsealed:
                raise CacheIncomplete(
                    f"{self.storage.url} is not sealed: its build has not finished; run the build again to finish it"
                ) from error
            records = Ledger(self.storage).records()
            self.index = index.build(records)
            self.shards = summaries(records, self.index)
            return
        if self.manifest.fingerprint != fingerprint(self.spec):
            raise CacheMismatch(
                f"{self.storage.url}: the manifest was sealed under settings {self.manifest.fingerprint[:12]}, "
                f"cache.json has {fingerprint(self.spec)[:12]}; one of the two was replaced"
            )
        if self.manifest.calibration != self._calibration:
            raise CacheMismatch(
                f"{self.storage.url}: the manifest was sealed with channel scales {self.manifest.calibration}, "
                f"the cache has {self._calibration}; one of the two was replaced"
            )
        where, content = self.storage.path(self.manifest.index), self.storage.read(self.manifest.index)
        if checksum(content) != self.manifest.index_checksum:
            raise ShardCorrupt(
                f"{where}: crc32c {checksum(content)}, manifest says {self.manifest.index_checksum}; "
                f"run 'cache_store repair {self.storage.url}' to make it anew from the records"
            )
        self.index = index.from_bytes(content, where)
        self.shards = self.manifest.shards

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> list[str]:
        """All sample ids, by position."""
        if self._ids is None:
            self._ids = index.column_list(self.index, "sample_id")
        return self._ids

    def sample_id(self, position: int) -> str:
        """Id of a position."""
        return self._sample_ids[position].as_py()

    def position(self, sample_id: str) -> int:
        """Position of an id. Raises NotFound."""
        if self._positions is None:
            self._positions = {name: position for position, name in enumerate(self.ids)}
        if sample_id not in self._positions:
            raise NotFound(f"{self.storage.url}: no sample {sample_id!r} among {len(self)}")
        return self._positions[sample_id]

    def read_id(self, sample_id: str) -> TargetSample:
        """One sample by id. Raises NotFound, ShardCorrupt."""
        return self.read(self.position(sample_id))

    def loss_mask(self, position: int) -> np.ndarray:
        """bool [T], from the index alone."""
        mask = np.zeros(int(self.tokens[position]), dtype=bool)
        for start, end in self._spans.of(position):
            mask[start:end] = True
        return mask

    def shard_of(self, position: int) -> str:
        """Object name of the shard that holds a sample."""
        return self.shards[int(self._where["shard"][position])].name

    def read(self, position: int, *, states: bool = True) -> TargetSample:
        """One sample. Raises ShardCorrupt.

        Without states only its text columns are read (not the checksum) and the two state arrays have no rows.
        """
        stored = self._fetch(position, states, _memory_of_thread if states else None)
        return self.decode(position, stored, states=states)

    def decode(self, position: int, stored: StoredSample, *, states: bool = True) -> TargetSample:
        """A fetched sample with its states decoded, into memory of its own. Raises ShardCorrupt."""
        tokens = len(stored.input_ids) if states else 0
        both = np.empty((self.spec.num_layers + 1, tokens, self.spec.hidden_size), np.uint16)
        hidden, last = both[:-1], both[-1]  # one block: the allocator keeps it for the next sample more often than two
        if states:
            self.decode_into(position, stored, hidden, last)
        return TargetSample(
            sample_id=stored.sample_id,
            # A view would keep all that was read of the sample in memory for as long as its tokens are.
            input_ids=stored.input_ids.copy(),
            loss_mask=stored.loss_mask.copy() if self.masks == "stored" else self.loss_mask(position),
            hidden_states=hidden,
            last_hidden_state=last,
            metadata=stored.metadata,
        )

    def fetch(self, position: int, *, states: bool = True) -> StoredSample:
        """One sample as stored, its planes undecoded: one ranged read. Raises ShardCorrupt after a second try."""
        return self._fetch(position, states, None)

    def _fetch(self, position: int, states: bool, memory: Memory | None) -> StoredSample:
        if not 0 <= position < len(self):
            raise CacheError(f"position {position} is outside the cache's {len(self)} samples")
        if self.excluded[position]:
            raise self._corrupt(position, "it is on the list of exclusions")
        try:
            return self._fetch_once(position, states, memory)
        except (CacheError, NotFound) as first:
            if isinstance(first, StorageError) and not isinstance(first, NotFound | ObjectEndsEarly):
                raise  # the storage has retried already
            with self._lock:
                self._layouts.pop(int(self._where["shard"][position]), None)
            try:
                return self._fetch_once(position, states, memory)
            except CacheError as error:
                raise self._corrupt(position, f"{error} (read twice)") from error

    def decode_into(self, position: int, stored: StoredSample, hidden: np.ndarray, last: np.ndarray) -> None:
        """Decode a fetched sample's states into the caller's memory.

        hidden: uint16 [L, t, D] of any strides, last: uint16 [t, D], zero afterwards where nothing is stored; t <= T
        cuts the sample on the right. Raises ShardCorrupt.
        """
        tokens, wanted = len(stored.input_ids), hidden.shape[1]
        if self.spec.last_hidden == "all":
            rows = np.arange(tokens)
            kept = rows[:wanted]
        else:
            rows = needed_positions(stored.loss_mask)
            kept = rows[: int(np.searchsorted(rows, wanted))]
        one_run = len(kept) > 0 and int(kept[-1] - kept[0]) + 1 == len(kept)
        final = last[kept[0] : kept[-1] + 1] if one_run else np.empty((len(kept), self.spec.hidden_size), np.uint16)
        try:
            self.codecs.captured.decode_into(stored.captured, tokens, hidden)
            self.codecs.last.decode_into(stored.last, len(rows), final[None])
        except CacheError as error:
            raise self._corrupt(position, str(error)) from error
        if one_run:
            last[: kept[0]], last[kept[-1] + 1 :] = 0, 0
        else:
            last[...] = 0
            last[kept] = final
        if self._must_check(position):
            bad = codec.count_nonfinite(hidden) + codec.count_nonfinite(final)
            if bad:
                raise self._corrupt(position, f"{bad} infinite or NaN values in its states")
            self._checked[position] = True

    def _must_check(self, position: int) -> bool:
        return self.verify == "always" or (self.verify == "first" and not self._checked[position])

    def _fetch_once(self, position: int, states: bool, memory: Memory | None) -> StoredSample:
        where = {name: int(values[position]) for name, values in self._where.items()}
        shard, row = self.shards[where["shard"]], where["row"]
        place = where["offset"], where["length"]
        layout = self._layout(where["shard"]) if not states else None
        if layout is not None:
            place = layout.text_range(row, place, int(self.tokens[position]))
        data = self._bytes(shard.name, place, where["checksum"] if states else None, memory)
        if states and self._must_check(position) and checksum(data) != f"{where['checksum']:08x}":
            raise CacheError(f"crc32c {checksum(data)}, record says {where['checksum']:08x}")
        stored = read_alone(shard.format, data) if states else None
        if stored is None:
            layout = layout or self._layout(where["shard"])
            try:
                stored = layout.read(row, place[0], data, states=states)
            except TextCut:
                return self._fetch_once(position, True, memory)
        sample_id = self.sample_id(position)
        if stored.sample_id != sample_id:
            raise CacheError(f"row {row} holds sample {stored.sample_id!r}, record says {sample_id!r}")
        if len(stored.input_ids) != self.tokens[position] or len(stored.loss_mask) != self.tokens[position]:
            raise CacheError(f"{len(stored.input_ids)} tokens, record says {self.tokens[position]}")
        return stored

    def _bytes(self, shard: str, place: tuple[int, int], crc: int | None, memory: Memory | None) -> bytes | memoryview:
        """A range of a shard; a whole sample (whose crc32c is known) by way of the disk cache, if there is one."""
        if crc is None or (cache := self.disk_cache()) is None:
            if memory is None or place[1] > READ_MEMORY:
                return self.storage.read_range(shard, *place)
            data = memory(place[1])
            self.storage.read_into(shard, place[0], data)
            return data
        key = f"{shard} {place[0]} {place[1]}"
        return cache.get(key, f"{crc:08x}", lambda: self.storage.read_range(shard, *place))

    def disk_cache(self) -> DiskCache | None:
        """The disk cache, opened by the first read of states: many readers only look at the index."""
        if self._disk_options is None:
            return None
        with self._lock:
            if self._disk_cache is None:
                self._disk_cache = DiskCache(self._disk_options)
            return self._disk_cache

    def _layout(self, number: int) -> ShardLayout:
        with self._lock:
            if number in self._layouts:
                self._layouts.move_to_end(number)
                return self._layouts[number]
        shard = self.shards[number]
        start = shard.num_bytes - shard.footer_bytes
        layout = open_layout(shard.format, self.storage.read_range(shard.name, start, shard.footer_bytes))
        with self._lock:
            self._layouts[number] = layout
            if len(self._layouts) > LAYOUTS_KEPT:
                self._layouts.popitem(last=False)
        return layout

    def _corrupt(self, position: int, found: str) -> ShardCorrupt:
        shard, sample = self.storage.path(self.shard_of(position)), self.sample_id(position)
        found = " ".join(found.split())  # libraries' messages have several lines
        return ShardCorrupt(
            f"{shard}: sample {sample!r}: {found}; run 'cache_store repair {self.storage.url}' and the same build "
            "again to make it anew, or 'cache_store repair --exclude' to go on without it"
        )
