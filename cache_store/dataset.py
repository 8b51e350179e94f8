"""Training batches streamed from Target Caches: the only file of the store that knows torch.

Every rank yields, for every optimizer step, the same number of micro-batches, whatever its share of the samples, so
that collective operations stay in step; the samples and rows of a step depend on (seed, step) alone (`packing.py`).
Legend: N documents (samples), B rows, T tokens of the longest row, L captured layers, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cache_store.errors import CacheError
from cache_store.mixture import SampleSet, Source
from cache_store.packing import StepShare, StreamConfig, share_of_step
from cache_store.prefetch import PrefetchGate
from cache_store.reader import Verify
from cache_store.schema import is_int
from cache_store.slots import Slot, SlotPool

FETCHES_AT_ONCE = 8
"""Ranged reads that one loader process keeps in flight (storage latency, not processor time)."""
STATES = ("hidden_states", "last_hidden_state")
"""The large tensors of a batch."""


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
    """int64 [N]: positions in the epoch's samples (`SampleSet`)."""
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
    slot: Slot | None = None
    """In a loader process: the memory that holds the two tensors above."""

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [B, T]: position of a token within its own document; 0 at padding."""
        columns = torch.arange(self.documents.shape[1]).expand_as(self.documents)
        if not len(self.starts):
            return torch.zeros_like(columns)
        return torch.where(self.documents < 0, 0, columns - self.starts[self.documents.clamp(min=0)])

    def pin_memory(self) -> CacheBatch:
        """The same batch in page-locked memory (DataLoader calls this)."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _tensor_names()})

    def __reduce__(self) -> tuple[Any, ...]:
        """How a loader process hands a batch over: the states in memory that it lends, everything else by value.

        Every tensor that crosses costs a file descriptor and a connection, some 0.1 ms, whatever its size.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {name: values[name].numpy() for name in _tensor_names() if name not in STATES}
        plain = {name: value for name, value in values.items() if name not in STATES}
        shapes = [tuple(values[name].shape) for name in STATES]
        states = self.slot or torch.cat([values[name].reshape(-1) for name in STATES])
        return _received, (states, shapes, {**plain, **small, "slot": None})


def _tensor_names() -> list[str]:
    return [field.name for field in fields(CacheBatch) if field.type == "torch.Tensor"]


def _apart(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that lie one after the other, as views."""
    first, second = map(math.prod, shapes)
    return flat[:first].view(shapes[0]), flat[first : first + second].view(shapes[1])


def _received(states: Slot | torch.Tensor, shapes: list[tuple[int, ...]], values: dict[str, Any]) -> CacheBatch:
    """The batch that `CacheBatch.__reduce__` took apart."""
    tensors = {name: torch.from_numpy(value) for name, value in values.items() if isinstance(value, np.ndarray)}
    flat = torch.from_numpy(states.map()).view(torch.bfloat16) if isinstance(states, Slot) else states
    hidden, last = _apart(flat, shapes)
    return CacheBatch(**{**values, **tensors}, hidden_states=hidden, last_hidden_state=last)


@dataclass(frozen=True, slots=True)
class _Tools:
    """What one pass over a stream keeps."""

    threads: ThreadPoolExecutor
    slots: SlotPool | None
    """In a loader process."""


class TargetCacheStream(IterableDataset):
    """Micro-batches of one rank, in order. Loader workers take turns, so their number does not change the order.

    `state_dict` is two integers, (epoch, position): the place of the next optimizer step in the concatenated epochs,
    the same on every rank, so a run may continue on another number of ranks or loader workers. The caches are opened
    in the process that reads them. Raises CacheIncomplete when there are no samples, and whatever `SampleSet` raises.
    """

    def __init__(
        self, sources: Sequence[Source], config: StreamConfig, *, verify: Verify = "first", allow_unsealed: bool = False
    ) -> None:
        super().__init__()
        self.sources, self.config = tuple(sources), config
        self.next_step = config.start_step
        """First optimizer step whose batches have not all been handed out."""
        self.gate: PrefetchGate | None = None
        self._verify, self._allow_unsealed = verify, allow_unsealed
        self._samples_per_epoch: int | None = None

    def open(self) -> SampleSet:
        """The samples, opened anew."""
        return SampleSet(self.sources, verify=self._verify, allow_unsealed=self._allow_unsealed)

    def state_dict(self) -> dict[str, int]:
        """{"epoch", "position"} of the next optimizer step."""
        epoch, position = divmod(self.next_step * self.config.global_batch_size, self._epoch_length())
        return {"epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a stream over the same samples stood. Raises CacheError for the state of another stream."""
        size, batch = self._epoch_length(), self.config.global_batch_size
        if set(state) != {"epoch", "position"} or not all(is_int(value) and value >= 0 for value in state.values()):
            raise CacheError(f"stream: state {dict(state)!r:.80}, wanted non-negative integers epoch and position")
        if state["position"] >= size:
            raise CacheError(f"stream: state {dict(state)} lies outside an epoch of {size} samples: other caches?")
        step, rest = divmod(state["epoch"] * size + state["position"], batch)
        if rest:
            raise CacheError(f"stream: state {dict(state)} is not the start of a step of {batch} samples")
        self.next_step = step

    def __iter__(self) -> Iterator[CacheBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        samples = self.open()
        number = -1
        with ThreadPoolExecutor(max_workers=FETCHES_AT_ONCE) as threads:
            tools = _Tools(threads, None if info is None else SlotPool())
            for step in range(self.next_step, self.config.num_steps):
                share = share_of_step(self.config, len(samples), samples.tokens, step)
                for micro in range(share.micro_batches):
                    number += 1
                    mine = number % workers == worker
                    if self.gate is not None and not self.gate.admit(self._bytes(samples, share, micro), wait=mine):
                        return
                    if not mine:
                        continue
                    batch = self._batch(samples, tools, share, (step, micro))
                    if micro + 1 == share.micro_batches:
                        self.next_step = step + 1
                    yield batch

    def _epoch_length(self) -> int:
        if self._samples_per_epoch is None:
            self._samples_per_epoch = len(self.open())
        return self._samples_per_epoch

    def _rows(self, share: StepShare, micro: int) -> list[list[int]]:
        start = micro * self.config.micro_batch_size
        return share.rows[start : start + self.config.micro_batch_size]

    def _bytes(self, samples: SampleSet, share: StepShare, micro: int) -> int:
        """Memory of a micro-batch: its tensors, and its samples as stored while they are decoded."""
        rows = self._rows(share, micro)
        longest = max((int(share.lengths[row].sum()) for row in rows), default=0)
        places = [place for row in rows for place in row]
        stored = samples.stored_bytes(share.epochs[places], share.positions[places])
        return len(rows) * longest * token_bytes(samples) + stored

    def _batch(self, samples: SampleSet, tools: _Tools, share: StepShare, place: tuple[int, int]) -> CacheBatch:
        rows = self._rows(share, place[1])
        places = [document for row in rows for document in row]
        lengths = share.lengths[places]
        starts = [int(start) for row in rows for start in np.cumsum([0, *share.lengths[row]])[:-1]]
        longest = max((int(share.lengths[row].sum()) for row in rows), default=1)
        epochs, positions = share.epochs[places], share.positions[places]
        found = [samples.find(int(e), int(p)) for e, p in zip(epochs, positions, strict=True)]
        spec, shape = samples.spec, (len(rows), longest)
        states = [(*shape, spec.num_layers * spec.hidden_size), (*shape, spec.hidden_size)]
        num_bytes = 2 * sum(map(math.prod, states))
        lent = tools.slots.take(num_bytes) if tools.slots is not None and num_bytes else None
        memory = torch.empty(num_bytes, dtype=torch.uint8) if lent is None else torch.from_numpy(lent[1])
        hidden, last = _apart(memory.view(torch.bfloat16), states)
        batch = CacheBatch(
            step=place[0],
            micro_index=place[1],
            micro_batches=share.micro_batches,
            sample_ids=[reader.sample_id(position) for reader, position in found],
            epochs=torch.from_numpy(epochs),
            positions=torch.from_numpy(positions),
            rows=torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64)),
            starts=torch.tensor(starts, dtype=torch.int64),
            lengths=torch.from_numpy(lengths),
            input_ids=torch.zeros(shape, dtype=torch.int64),
            loss_mask=torch.zeros(shape, dtype=torch.bool),
            documents=torch.full(shape, -1, dtype=torch.int64),
            hidden_states=hidden,
            last_hidden_state=last,
            slot=None if lent is None else lent[0],
        )
        for row, documents in enumerate(rows):
            used = int(share.lengths[documents].sum())
            batch.hidden_states[row, used:] = 0  # the rest of these large tensors is written once, by the decoder
            batch.last_hidden_state[row, used:] = 0

        def fill(document: int) -> None:
            _fill(batch, document, *found[document])

        # A local file answers at once: threads would only fight for the interpreter.
        local = all(reader.storage.local_root is not None for reader, _ in found)
        for _ in (map if local else tools.threads.map)(fill, range(len(places))):
            pass  # either hands on the first error of a document
        return batch


def token_bytes(samples: SampleSet) -> int:
    """Bytes of one token of a batch."""
    return (samples.spec.num_layers + 1) * samples.spec.hidden_size * 2 + 8 + 8 + 1


def _fill(batch: CacheBatch, document: int, reader: Any, position: int) -> None:
    """Decode a sample straight into its place of the batch: no copy of the states in between."""
    row, start, tokens = (int(values[document]) for values in (batch.rows, batch.starts, batch.lengths))
    columns = slice(start, start + tokens)
    stored = reader.fetch(position)
    batch.input_ids[row, columns] = torch.from_numpy(stored.input_ids[:tokens].astype(np.int64))
    batch.loss_mask[row, columns] = torch.from_numpy(reader.loss_mask(position)[:tokens])
    batch.documents[row, columns] = document
    hidden = batch.hidden_states[row, columns].view(torch.uint16).numpy()
    last = batch.last_hidden_state[row, columns].view(torch.uint16).numpy()
    layered = hidden.reshape(tokens, reader.spec.num_layers, reader.spec.hidden_size).transpose(1, 0, 2)
    reader.decode_into(position, stored, layered, last)


class StreamLoader:
    """Iterates over a stream in this process (0 workers) or in loader processes, and keeps the stream's state.

    Ready batches are bounded twice: `prefetch` of them per worker, and `prefetch_bytes` of all workers together, the
    batch in use included (one batch is always allowed).
    """

    def __init__(
        self,
        stream: TargetCacheStream,
        *,
        num_workers: int,
        prefetch: int,
        prefetch_bytes: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.stream = stream
        self._num_workers, self._prefetch, self._pin_memory = num_workers, prefetch, pin_memory
        self._prefetch_bytes = prefetch_bytes

    def state_dict(self) -> dict[str, int]:
        """The stream's state: of the optimizer step after the last one that was handed out whole."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there; for the next iteration."""
        self.stream.load_state_dict(state)

    def __iter__(self) -> Iterator[CacheBatch]:
        stream = self.stream
        gate = PrefetchGate(self._prefetch_bytes) if self._num_workers and self._prefetch_bytes else None
        stream.gate = gate
        loader: DataLoader[CacheBatch] = DataLoader(
            stream,
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch if self._num_workers else None,
            pin_memory=self._pin_memory,
        )
        batches = iter(loader)
        try:
            while True:
                if gate is not None:
                    gate.released()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if batch.micro_index + 1 == batch.micro_batches:
                    stream.next_step = batch.step + 1
                yield batch
        finally:
            stream.gate = None
            if gate is not None:
                gate.close()


def make_loader(
    stream: TargetCacheStream,
    *,
    num_workers: int,
    prefetch: int,
    prefetch_bytes: int | None = None,
    pin_memory: bool = False,
) -> StreamLoader:
    """A loader that keeps up to `prefetch` micro-batches ready per worker process; 0 workers reads in this process."""
    return StreamLoader(
        stream, num_workers=num_workers, prefetch=prefetch, prefetch_bytes=prefetch_bytes, pin_memory=pin_memory
    )
