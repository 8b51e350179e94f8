"""The parts of the cache benchmark that are not the clock: baselines that read the same values, and its arithmetic."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cache import SUMMARY, WANTED, parts, verdict
from benchmarks.cache_codecs import in_turns, raw_bytes, stored_bytes
from benchmarks.cache_data import variant
from benchmarks.cache_epoch import collate, rows
from benchmarks.cache_memory import TOKENS, write
from benchmarks.cache_reads import plain_samples, read_plain
from cache_store.dataset import TargetCacheStream
from cache_store.mixture import Source
from cache_store.packing import StreamConfig
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec

COUNT = 5


@pytest.fixture
def source(tmp_path: Path) -> CacheReader:
    storage = open_storage(str(tmp_path / "raw"))
    build_cache(storage, make_spec(codec="raw", last_hidden="all", hidden_size=64), COUNT, tokens=70)
    return CacheReader(storage)


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_the_plain_reads_give_the_reader_s_values(source: CacheReader, tmp_path: Path, form: str) -> None:
    reader = CacheReader(variant(source, tmp_path, "bss1", format=form, codec="bss1"))
    files = {shard.name: os.open(tmp_path / "bss1" / shard.name, os.O_RDONLY) for shard in reader.shards}
    for position, plain in enumerate(plain_samples(reader)):
        hidden, last = read_plain(plain, lambda shard, offset, length: os.pread(files[shard], length, offset))
        sample = reader.read(position)
        assert np.array_equal(hidden, sample.hidden_states)
        assert np.array_equal(last, sample.last_hidden_state)
    for file in files.values():
        os.close(file)


def test_variants_are_made_once_and_hold_the_same_samples(source: CacheReader, tmp_path: Path) -> None:
    storage = variant(source, tmp_path, "i8cr", codec="i8cr", last_codec="i8cr", format="tar")
    before = storage.read("manifest.json")
    assert variant(source, tmp_path, "i8cr", codec="i8cr").read("manifest.json") == before
    reader = CacheReader(storage)
    assert reader.ids == source.ids
    assert reader.spec.codec == "i8cr"
    assert raw_bytes(source) == COUNT * 70 * 3 * 64 * 2
    assert stored_bytes(storage) < 0.8 * stored_bytes(source.storage)


def test_the_others_get_the_batches_that_we_get(source: CacheReader) -> None:
    config = StreamConfig(seed=0, global_batch_size=COUNT, micro_batch_size=COUNT, max_length=999, num_steps=1)
    (ours,) = TargetCacheStream([Source(storage=source.storage)], config)
    by_id = {row["id"]: row for row in rows(source)}
    theirs = collate([by_id[sample_id] for sample_id in ours.sample_ids])
    assert torch.equal(theirs["hidden"].view(torch.int16), ours.hidden_states.view(torch.int16))
    assert torch.equal(theirs["last"].view(torch.int16), ours.last_hidden_state.view(torch.int16))
    assert torch.equal(theirs["ids"], ours.input_ids)
    assert torch.equal(theirs["mask"].bool(), ours.loss_mask)


def test_the_large_cache_repeats_the_small_one(source: CacheReader, tmp_path: Path) -> None:
    small, large = (CacheReader(open_storage(str(write(source, tmp_path / str(n), n)))) for n in (1, 3))
    assert len(large) == 3 * len(small) == 3 * COUNT
    assert set(large.tokens.tolist()) == {TOKENS}
    assert np.array_equal(large.read_id("2-s0001").hidden_states, small.read_id("0-s0001").hidden_states)


def test_tasks_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    ticks = iter(range(1000))
    seconds = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, lambda: float(next(ticks)))
    assert order == ["a", "b"] * 3
    assert seconds == {"a": 1.0, "b": 1.0}


def test_verdicts() -> None:
    assert verdict("lossless_ratio", 0.7) == "<= 0.7: yes"
    assert verdict("lossless_ratio", 0.71) == "<= 0.7: NO"
    assert verdict("epoch_vs_mosaicml", 0.99) == ">= 1: NO"
    assert verdict("something_else", 1.0) == ""
    assert set(SUMMARY) <= set(WANTED)
    assert set(parts(Path("t"))) == {"sizes", "exact", "errors", "decode", "local", "s3", "epoch", "memory"}
