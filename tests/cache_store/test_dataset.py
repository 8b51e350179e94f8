from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.dataset import CacheBatch, StreamConfig, TargetCacheStream, make_loader
from cache_store.errors import CacheError, CacheIncomplete, ShardCorrupt
from cache_store.ledger import Ledger
from cache_store.order import step_samples
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec

COUNT = 11


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    storage = open_storage(str(tmp_path_factory.mktemp("stream") / "cache"))
    build_cache(storage, make_spec(shard_bytes=4000), COUNT)
    return storage


def config(**changes: Any) -> StreamConfig:
    settings_ = {"seed": 1, "global_batch_size": 5, "micro_batch_size": 2, "max_length": 64, "num_steps": 4}
    return StreamConfig(**{**settings_, **changes})


def batches(storage: Storage, workers: int = 0, **changes: Any) -> list[CacheBatch]:
    return list(make_loader(TargetCacheStream(storage, config(**changes)), num_workers=workers, prefetch=2))


def key(batch: CacheBatch) -> tuple[Any, ...]:
    tensors = (batch.epochs, batch.positions, batch.input_ids, batch.lengths, batch.loss_mask)
    states = (batch.hidden_states.view(torch.int16), batch.last_hidden_state.view(torch.int16))
    return (batch.step, batch.micro_index, *batch.sample_ids, *[str(t.tolist()) for t in (*tensors, *states)])


def test_same_batches_for_any_number_of_loader_workers(storage: Storage) -> None:
    wanted = [key(batch) for batch in batches(storage)]
    assert len(wanted) == 4 * 3
    for workers in (1, 2):
        assert [key(batch) for batch in batches(storage, workers)] == wanted


@settings(max_examples=25, deadline=None)
@given(
    world=st.integers(1, 6),
    micro=st.integers(1, 4),
    size=st.integers(1, 16),
    start=st.integers(0, 3),
)
def test_any_topology_reads_the_same_global_batches(
    storage: Storage, world: int, micro: int, size: int, start: int
) -> None:
    share = {"global_batch_size": size, "micro_batch_size": micro, "start_step": start, "world_size": world}
    ranks = [batches(storage, rank=rank, **share) for rank in range(world)]
    expected = math.ceil(math.ceil(size / world) / micro)
    for step in range(start, 4):
        found: list[tuple[int, int]] = []
        for rank in ranks:
            mine = [batch for batch in rank if batch.step == step]
            assert [batch.micro_index for batch in mine] == list(range(expected)), "every rank keeps in step"
            for batch in mine:
                assert len(batch.sample_ids) <= micro
                found += zip(batch.epochs.tolist(), batch.positions.tolist(), strict=True)
        epochs, positions = step_samples(1, COUNT, size, step)
        assert found == list(zip(epochs.tolist(), positions.tolist(), strict=True))


def test_resume_continues_where_it_stopped(storage: Storage) -> None:
    whole = [key(batch) for batch in batches(storage)]
    resumed = [key(batch) for batch in batches(storage, workers=2, start_step=2)]
    assert resumed == whole[6:]
    assert batches(storage, start_step=4) == []


def test_contents_are_the_cache_s_own(storage: Storage) -> None:
    reader = CacheReader(storage)
    for batch in batches(storage):
        rows = len(batch.sample_ids)
        longest = int(batch.lengths.max())
        assert batch.hidden_states.shape == (rows, longest, 2 * 16)
        assert batch.hidden_states.dtype == batch.last_hidden_state.dtype == torch.bfloat16
        assert (batch.input_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
        for row, sample_id in enumerate(batch.sample_ids):
            sample = reader.read_id(sample_id)
            tokens = int(batch.lengths[row])
            assert batch.documents[row].tolist() == [row] * tokens + [-1] * (longest - tokens)
            assert batch.position_ids[row].tolist() == list(range(tokens)) + [0] * (longest - tokens)
            assert reader.position(sample_id) == batch.positions[row]
            assert batch.input_ids[row, :tokens].tolist() == sample.input_ids.tolist()
            assert batch.loss_mask[row, :tokens].tolist() == sample.loss_mask.tolist()
            hidden = batch.hidden_states[row, :tokens].view(torch.uint16).numpy()
            layers = np.concatenate(list(sample.hidden_states), axis=-1)  # ascending, one after another per token
            assert np.array_equal(hidden, layers)
            last = batch.last_hidden_state[row, :tokens].view(torch.uint16).numpy()
            assert np.array_equal(last, sample.last_hidden_state)
            for tensor in (batch.input_ids, batch.loss_mask, batch.hidden_states, batch.last_hidden_state):
                assert not tensor[row, tokens:].any()


def test_long_samples_are_cut_on_the_right(storage: Storage) -> None:
    reader = CacheReader(storage)
    for batch in batches(storage, max_length=6):
        assert batch.input_ids.shape[1] <= 6
        for row, sample_id in enumerate(batch.sample_ids):
            sample = reader.read_id(sample_id)
            tokens = min(6, len(sample.input_ids))
            assert batch.lengths[row] == tokens
            found = batch.hidden_states[row, :tokens].view(torch.uint16).numpy().reshape(tokens, 2, 16)
            assert np.array_equal(found.transpose(1, 0, 2), sample.hidden_states[:, :tokens])


def test_rank_without_samples_yields_empty_batches(storage: Storage) -> None:
    found = batches(storage, global_batch_size=2, world_size=3, rank=0)
    assert [len(batch.sample_ids) for batch in found] == [0, 0, 0, 0]
    batch = found[0]
    assert batch.hidden_states.shape == (0, 1, 32)
    assert batch.last_hidden_state.shape == (0, 1, 16)
    assert batch.input_ids.shape == batch.loss_mask.shape == (0, 1)
    assert batch.epochs.shape == batch.positions.shape == batch.lengths.shape == (0,)
    assert batch.rows.shape == batch.starts.shape == (0,)
    assert batch.documents.shape == batch.position_ids.shape == (0, 1)


def test_pinning_keeps_everything(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())  # real pinning needs a GPU
    batch = batches(storage)[0]
    pinned = batch.pin_memory()
    assert key(pinned) == key(batch)
    assert pinned.hidden_states is not batch.hidden_states


def test_empty_cache_is_refused(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 0)
    with pytest.raises(CacheIncomplete, match="holds no samples to train on"):
        batches(storage)


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_reaches_the_trainer_with_its_type(tmp_path: Path, workers: int) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 4)
    record = Ledger(storage).records()[0]
    path = tmp_path / "cache" / record.name
    content = bytearray(path.read_bytes())
    content[record.samples[2].offset + record.samples[2].length - 3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ShardCorrupt, match="s0002"):
        batches(storage, workers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"start_step": -1}, "start_step is -1"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
    ],
)
def test_impossible_streams_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        config(**changes)
