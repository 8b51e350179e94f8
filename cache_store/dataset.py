"""Training batches streamed from a Target Cache: the only file of the store that knows torch.

Every rank yields, for every optimizer step, the same number of micro-batches, whatever its share of the samples, so
that collective operations stay in step; the samples of a step depend on (seed, step) alone (`order.py`).
Legend: N documents (samples), B rows, T tokens of the longest row, L captured layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cache_store.errors import CacheError, CacheIncomplete
from cache_store.order import rank_slice, step_samples
from cache_store.reader import CacheReader, Verify
from cache_store.storage import Storage

FETCHES_AT_ONCE = 8
"""Ranged reads that one loader process keeps in flight (storage latency, not processor time)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """Which samples a rank reads, and in which portions."""

    seed: int
    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int
    max_length: int
    """Longer samples are cut on the right."""
    rank: int = 0
    world_size: int = 1
    start_step: int = 0
    """First optimizer step to yield: a resumed run continues at its step."""
    num_steps: int
    """Optimizer steps of the whole run: the stream yields start_step .. num_steps - 1."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {getattr(self, name)}, wanted at least {least}"
            for name, least in (("global_batch_size", 1), ("micro_batch_size", 1), ("max_length", 2), ("start_step", 0))
            if getattr(self, name) < least
        ]
        if not 0 <= self.rank < self.world_size:
            wrong.append(f"rank {self.rank} is not one of {self.world_size} ranks")
        if wrong:
            raise CacheError("stream: " + "; ".join(wrong))

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step, the same on every rank."""
        largest_share = -(-self.global_batch_size // self.world_size)
        return -(-largest_share // self.micro_batch_size)


@dataclass(frozen=True, slots=True)
class CacheBatch:
    """One micro-batch: N documents (samples) in B rows, padded with zeros on the right.

    Without packing every row is one document: N = B, `rows` = 0..B-1, `starts` = 0. With packing the documents of a
    row stand one after another; they never share attention. B may be 0 (then T = 1): the rank has no sample left.
    """

    step: int
    micro_index: int
    micro_batches: int
    """Micro-batches of this optimizer step, the same on every rank."""
    sample_ids: list[str]
    """Of the N documents."""
    epochs: torch.Tensor
    """int64 [N]: with `positions`, the key of a sample's own randomness (anchors)."""
    positions: torch.Tensor
    """int64 [N]: positions in the cache."""
    rows: torch.Tensor
    """int64 [N], ascending: the row that holds the document."""
    starts: torch.Tensor
    """int64 [N]: column of its first token; its own token positions count from 0 there."""
    lengths: torch.Tensor
    """int64 [N]: its tokens."""
    input_ids: torch.Tensor
    """int64 [B, T]."""
    loss_mask: torch.Tensor
    """bool [B, T]."""
    documents: torch.Tensor
    """int64 [B, T]: number of the document (0..N-1) that a token belongs to; -1 at padding."""
    hidden_states: torch.Tensor
    """bfloat16 [B, T, L*D]: the captured layers of a token, ascending, one after another."""
    last_hidden_state: torch.Tensor
    """bfloat16 [B, T, D]; zero rows where the cache does not store it."""

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [B, T]: position of a token within its own document; 0 at padding."""
        columns = torch.arange(self.documents.shape[1]).expand_as(self.documents)
        if not len(self.starts):
            return torch.zeros_like(columns)
        return torch.where(self.documents < 0, 0, columns - self.starts[self.documents.clamp(min=0)])

    def pin_memory(self) -> CacheBatch:
        """The same batch in page-locked memory (DataLoader calls this)."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.type == "torch.Tensor"}
        return replace(self, **{name: tensor.pin_memory() for name, tensor in tensors.items()})


class TargetCacheStream(IterableDataset):
    """Micro-batches of one rank, in order. Loader workers take turns, so their number does not change the order.

    The cache is opened in the process that reads it. Raises CacheIncomplete for a cache without samples, and whatever
    `CacheReader` raises.
    """

    def __init__(
        self, storage: Storage, config: StreamConfig, *, verify: Verify = "first", allow_unsealed: bool = False
    ) -> None:
        super().__init__()
        self.storage, self.config = storage, config
        self._verify, self._allow_unsealed = verify, allow_unsealed

    def __len__(self) -> int:
        return max(0, self.config.num_steps - self.config.start_step) * self.config.micro_batches

    def __iter__(self) -> Iterator[CacheBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = CacheReader(self.storage, verify=self._verify, allow_unsealed=self._allow_unsealed)
        if len(reader) == 0:
            raise CacheIncomplete(f"{self.storage.url} holds no samples to train on")
        with ThreadPoolExecutor(max_workers=FETCHES_AT_ONCE) as pool:
            for number in range(worker, len(self), workers):
                step, micro = divmod(number, self.config.micro_batches)
                yield self._batch(reader, pool, self.config.start_step + step, micro)

    def _batch(self, reader: CacheReader, pool: ThreadPoolExecutor, step: int, micro: int) -> CacheBatch:
        config = self.config
        epochs, positions = step_samples(config.seed, len(reader), config.global_batch_size, step)
        share = rank_slice(config.global_batch_size, config.rank, config.world_size)
        start = share.start + micro * config.micro_batch_size
        chosen = slice(start, max(start, min(start + config.micro_batch_size, share.stop)))
        epochs, positions = epochs[chosen], positions[chosen]
        lengths = np.minimum(reader.tokens[positions], config.max_length)
        size, longest = len(positions), int(lengths.max(initial=1))
        spec = reader.spec
        batch = CacheBatch(
            step=step,
            micro_index=micro,
            micro_batches=config.micro_batches,
            sample_ids=[reader.sample_id(int(position)) for position in positions],
            epochs=torch.from_numpy(epochs),
            positions=torch.from_numpy(positions),
            rows=torch.arange(size),
            starts=torch.zeros(size, dtype=torch.int64),
            lengths=torch.from_numpy(lengths),
            input_ids=torch.zeros(size, longest, dtype=torch.int64),
            loss_mask=torch.zeros(size, longest, dtype=torch.bool),
            documents=torch.full((size, longest), -1, dtype=torch.int64),
            hidden_states=torch.empty(size, longest, spec.num_layers * spec.hidden_size, dtype=torch.bfloat16),
            last_hidden_state=torch.zeros(size, longest, spec.hidden_size, dtype=torch.bfloat16),
        )
        for _ in pool.map(lambda row: _fill(reader, batch, row), range(size)):
            pass  # map hands on the first error of a row
        return batch


def _fill(reader: CacheReader, batch: CacheBatch, row: int) -> None:
    """Decode a sample straight into its row of the batch: no copy of the states in between."""
    position, tokens = int(batch.positions[row]), int(batch.lengths[row])
    stored = reader.fetch(position)
    batch.input_ids[row, :tokens] = torch.from_numpy(stored.input_ids[:tokens].astype(np.int64))
    batch.loss_mask[row, :tokens] = torch.from_numpy(stored.loss_mask[:tokens])
    batch.documents[row, :tokens] = row
    batch.hidden_states[row, tokens:] = 0  # the rest of this large tensor is written once, by the decoder
    hidden = batch.hidden_states[row, :tokens].view(torch.uint16).numpy()
    last = batch.last_hidden_state[row, :tokens].view(torch.uint16).numpy()
    layered = hidden.reshape(tokens, reader.spec.num_layers, reader.spec.hidden_size).transpose(1, 0, 2)
    reader.decode_into(position, stored, layered, last)


def make_loader(
    stream: TargetCacheStream, *, num_workers: int, prefetch: int, pin_memory: bool = False
) -> DataLoader[CacheBatch]:
    """A loader that keeps `prefetch` micro-batches ready per worker process; 0 workers reads in this process."""
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
    )
