from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store import codec
from cache_store.inspection import HISTOGRAM_BINS, inspect_cache, layer_facts, length_histogram, segments
from cache_store.ledger import Ledger, Reject
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_sample, make_spec


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_histogram_counts_every_sample_once(lengths: list[int]) -> None:
    bins = length_histogram(np.array(lengths, dtype=np.int64))
    assert len(bins) <= HISTOGRAM_BINS
    for item in bins:
        assert item.samples == sum(item.low <= length <= item.high for length in lengths)
    assert sum(item.samples for item in bins) == len(lengths)


@pytest.mark.parametrize("sealed", [True, False])
def test_totals(tmp_path: Path, sealed: bool) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    spec = make_spec(shard_bytes=4000)
    samples = build_cache(storage, spec, 9, sealed=sealed)
    if not sealed:
        Ledger(storage).reject([Reject(sample_id="x", stage="extract", reason="short")])
        Ledger(storage).reject([Reject(sample_id="s0001", stage="extract", reason="tried again and committed")])
    facts = inspect_cache(CacheReader(storage, allow_unsealed=True))
    assert facts.sealed is sealed
    assert facts.samples == 9
    assert facts.tokens == sum(len(sample.input_ids) for sample in samples)
    assert facts.supervised_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert facts.raw_bytes == sum(sample.hidden_states.nbytes + sample.last_hidden_state.nbytes for sample in samples)
    assert facts.stored_bytes == sum(info.size for info in storage.list("shards/"))
    assert facts.rejects == ({} if sealed else {"extract": {"short": 1}})
    assert facts.finish_reasons == {"stop": 9}
    assert facts.duplicates == 0
    assert facts.identity == spec.identity
    assert [layer.layer for layer in facts.layers] == ["0", "2", "last"]
    assert facts.probed_samples == 8


def test_what_the_codecs_lost_is_shown(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(codec="i8cr", format="tar"), 9)
    facts = inspect_cache(CacheReader(storage))
    assert (facts.settings["format"], facts.settings["codec"], facts.settings["last_codec"]) == ("tar", "i8cr", "bss1")
    assert [error.tensor for error in facts.errors] == ["0", "2"]
    assert all(0 < error.mean < error.max <= 0.01 for error in facts.errors)


def test_layer_facts_separate_the_first_token() -> None:
    spec = make_spec()
    values = np.ones((2, 4, 16), np.float32)
    values[0, 0, 5] = 1000.0
    values[0, 2, 5] = -3.0
    last = np.zeros((4, 16), np.float32)
    last[2:] = 2.0  # the rows of other positions are not stored and do not count
    sample = make_sample(spec, 0, tokens=4, hidden_states=codec.to_bits(values), last_hidden_state=codec.to_bits(last))
    first, second, final = layer_facts(spec.layer_ids, [sample])
    assert (first.max_abs, first.max_abs_after_first) == (1000.0, 3.0)
    assert (second.rms, second.max_abs) == (1.0, 1.0)
    assert (final.rms, final.max_abs) == (2.0, 2.0)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_segments_cut_where_supervision_changes(mask: list[bool]) -> None:
    sample = make_sample(make_spec(), 3, tokens=len(mask), loss_mask=np.array(mask))
    parts = segments(sample)
    assert [token for part in parts for token in part.ids] == sample.input_ids.tolist()
    assert [part.supervised for part in parts for _ in part.ids] == mask
    assert all(a.supervised != b.supervised for a, b in itertools.pairwise(parts))


def test_empty_cache(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 0)
    facts = inspect_cache(CacheReader(storage))
    assert (facts.samples, facts.lengths, facts.layers, facts.finish_reasons) == (0, (), (), {})
