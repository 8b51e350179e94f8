from __future__ import annotations

import pickle
import time
from dataclasses import replace
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
from cache_store.mixture import SampleSet, Source
from cache_store.order import step_samples
from cache_store.reader import CacheReader
from cache_store.selection import Selection, unit_hash
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec

COUNT = 11


@pytest.fixture(scope="module", params=[("parquet", "bss1"), ("tar", "i8cr")], ids="-".join)
def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    form, codec = request.param
    storage = open_storage(str(tmp_path_factory.mktemp("stream") / "cache"))
    build_cache(storage, make_spec(format=form, codec=codec, shard_bytes=4000), COUNT)
    return storage


def config(**changes: Any) -> StreamConfig:
    settings_ = {"seed": 1, "global_batch_size": 5, "micro_batch_size": 2, "max_length": 20, "num_steps": 4}
    return StreamConfig(**{**settings_, **changes})


def stream_of(storage: Storage, **changes: Any) -> TargetCacheStream:
    return TargetCacheStream([Source(storage=storage)], config(**changes))


def batches(storage: Storage, workers: int = 0, **changes: Any) -> list[CacheBatch]:
    return list(make_loader(stream_of(storage, **changes), num_workers=workers, prefetch=2))


def key(batch: CacheBatch) -> tuple[Any, ...]:
    tensors = (batch.epochs, batch.positions, batch.rows, batch.starts, batch.lengths)
    tensors += (batch.input_ids, batch.loss_mask, batch.documents)
    states = (batch.hidden_states.view(torch.int16), batch.last_hidden_state.view(torch.int16))
    return (batch.step, batch.micro_index, *batch.sample_ids, *[str(t.tolist()) for t in (*tensors, *states)])


def test_same_batches_for_any_number_of_loader_workers(storage: Storage) -> None:
    wanted = [key(batch) for batch in batches(storage)]
    assert len(wanted) == 4 * 3
    for workers in (1, 2):
        assert [key(batch) for batch in batches(storage, workers)] == wanted


@settings(max_examples=30, deadline=None)
@given(
    world=st.integers(1, 6),
    micro=st.integers(1, 4),
    size=st.integers(1, 16),
    start=st.integers(0, 3),
    budget=st.none() | st.integers(20, 60),
)
def test_any_topology_reads_the_same_global_batches(
    storage: Storage, world: int, micro: int, size: int, start: int, budget: int | None
) -> None:
    share = {"global_batch_size": size, "micro_batch_size": micro, "start_step": start, "world_size": world}
    share |= {"pack_tokens": budget}
    ranks = [batches(storage, rank=rank, **share) for rank in range(world)]
    for step in range(start, 4):
        found: list[tuple[int, int]] = []
        counts = set()
        for rank in ranks:
            mine = [batch for batch in rank if batch.step == step]
            assert [batch.micro_index for batch in mine] == list(range(len(mine)))
            counts |= {len(mine), *(batch.micro_batches for batch in mine)}
            for batch in mine:
                assert len(batch.input_ids) <= micro
                found += zip(batch.epochs.tolist(), batch.positions.tolist(), strict=True)
        assert len(counts) == 1, "every rank keeps in step"
        epochs, positions = step_samples(1, COUNT, size, step)
        wanted = list(zip(epochs.tolist(), positions.tolist(), strict=True))
        assert (found if budget is None else sorted(found)) == (wanted if budget is None else sorted(wanted))


@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_continues_where_it_stopped(storage: Storage, workers: int, budget: int | None) -> None:
    """Stopped inside step 2 on two ranks, continued on three: the samples of every step are as if uninterrupted."""
    share = {"pack_tokens": budget, "global_batch_size": 9, "micro_batch_size": 1, "num_steps": 5}
    whole = batches(storage, **share)
    loader = make_loader(stream_of(storage, **share, rank=1, world_size=2), num_workers=workers, prefetch=2)
    for batch in loader:
        if batch.step == 2:
            break
    state = loader.state_dict()
    assert state == {"epoch": 1, "position": 2 * 9 - COUNT}
    resumed = []
    for rank in range(3):
        loader = make_loader(stream_of(storage, **share, rank=rank, world_size=3), num_workers=workers, prefetch=2)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        resumed += list(loader)
        assert loader.state_dict() == {"epoch": 4, "position": 5 * 9 - 4 * COUNT}
        assert list(loader) == []

    def samples(found: list[CacheBatch]) -> dict[int, list[str]]:
        return {step: sorted(i for b in found if b.step == step for i in b.sample_ids) for step in range(2, 5)}

    assert samples(resumed) == samples(whole)
    assert batches(storage, start_step=4) == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0}, "wanted non-negative integers epoch and position"),
        ({"epoch": 0, "position": -5}, "wanted non-negative"),
        ({"epoch": 0, "position": 5.0}, "wanted non-negative"),
        ({"epoch": 0, "position": 11}, "outside an epoch of 11 samples"),
        ({"epoch": 0, "position": 3}, "not the start of a step of 5 samples"),
    ],
)
def test_states_of_other_streams_are_refused(storage: Storage, state: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        stream_of(storage).load_state_dict(state)


def test_packed_rows_hold_whole_documents(storage: Storage) -> None:
    reader = CacheReader(storage)
    packed = batches(storage, pack_tokens=40, global_batch_size=11, num_steps=2)
    rows_used = sum(len(batch.input_ids) for batch in packed)
    assert rows_used < 2 * COUNT, "several samples share a row"
    for batch in packed:
        taken = torch.full(batch.input_ids.shape, -1)
        for document, sample_id in enumerate(batch.sample_ids):
            sample = reader.read_id(sample_id)
            row, start, tokens = (int(v[document]) for v in (batch.rows, batch.starts, batch.lengths))
            place = (row, slice(start, start + tokens))
            assert (taken[place] == -1).all()
            taken[place] = document
            assert batch.input_ids[place].tolist() == sample.input_ids.tolist()
            assert batch.loss_mask[place].tolist() == sample.loss_mask.tolist()
            assert batch.position_ids[place].tolist() == list(range(tokens))
            hidden = batch.hidden_states[place].view(torch.uint16).numpy()
            assert np.array_equal(hidden, np.concatenate(list(sample.hidden_states), axis=-1))
            assert np.array_equal(batch.last_hidden_state[place].view(torch.uint16).numpy(), sample.last_hidden_state)
        assert batch.documents.tolist() == taken.tolist()
        padding = taken == -1
        assert batch.input_ids.shape[1] <= 40
        for tensor in (batch.input_ids, batch.loss_mask, batch.hidden_states, batch.last_hidden_state):
            assert not tensor[padding].any()


@pytest.mark.parametrize("workers", [1, 2])
def test_bounded_prefetch_changes_nothing(storage: Storage, workers: int) -> None:
    wanted = [key(batch) for batch in batches(storage, pack_tokens=64)]
    for limit in (1, 10_000):
        stream = stream_of(storage, pack_tokens=64)
        loader = make_loader(stream, num_workers=workers, prefetch=2, prefetch_bytes=limit)
        assert [key(batch) for batch in loader] == wanted


def test_a_loader_may_be_left_early(storage: Storage) -> None:
    started = time.monotonic()
    for _ in make_loader(stream_of(storage), num_workers=2, prefetch=2, prefetch_bytes=1):
        break
    assert time.monotonic() - started < 4, "workers that wait for room are let go"


def test_selection_mix_and_masks_reach_the_batches(tmp_path: Path) -> None:
    urls = [open_storage(str(tmp_path / name)) for name in "ab"]
    for number, storage in enumerate(urls):
        build_cache(storage, make_spec(codec=("bss1", "raw")[number]), 6)
    selection = Selection(split="train", held_out_fraction=0.4)
    sources = [Source(storage=urls[0], selection=selection), Source(storage=urls[1], weight=0.5, masks="first_turn")]
    samples = SampleSet(sources)
    stream = TargetCacheStream(sources, config(global_batch_size=len(samples), num_steps=2))
    seen = [sample_id for batch in stream for sample_id in batch.sample_ids]
    held_out = [name for name in samples.readers[0].ids if unit_hash(name, "split") < 0.4]
    assert held_out
    assert len(seen) == 2 * len(samples) == 2 * (6 - len(held_out) + 3)
    for name in held_out:
        assert seen.count(name) == 1, "from the second cache only, every other epoch"


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
    with pytest.raises(CacheIncomplete, match=r"no samples to train on: .*cache: 0 of 0 samples"):
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


@pytest.mark.parametrize("budget", [None, 40])
def test_batches_survive_the_way_between_processes(storage: Storage, budget: int | None) -> None:
    for batch in batches(storage, pack_tokens=budget):
        apart = replace(batch, last_hidden_state=batch.last_hidden_state.clone())
        for copy in (pickle.loads(pickle.dumps(batch)), pickle.loads(pickle.dumps(apart))):
            assert key(copy) == key(batch)
            assert copy.micro_batches == batch.micro_batches
