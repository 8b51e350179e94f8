from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import AlreadyExists, CacheError, CacheMismatch, NotFound
from cache_store.ledger import seal
from cache_store.masks import Spans, write_masks
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import make_sample, make_spec

MASK = [0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0]
COUNT = 4
STORED = [(2, 4), (5, 8), (9, 10)]


def build(path: Path, last_hidden: str = "needed") -> Storage:
    storage, spec = open_storage(str(path)), make_spec(last_hidden=last_hidden)
    create_cache(storage, spec)
    with CacheWriter(storage, spec) as writer:
        for number in range(COUNT):
            writer.write(make_sample(spec, number, tokens=12, loss_mask=np.array(MASK, dtype=bool)))
    seal(storage, expected_ids=None)
    return storage


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    return build(tmp_path_factory.mktemp("masks") / "cache")


SPANS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=4), max_size=6)


def spans_of(values: list[list[tuple[int, int]]]) -> Spans:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int64)
    pairs = [pair for value in values for pair in value]
    return Spans(offsets, np.array(pairs, dtype=np.int32).reshape(-1, 2))


def as_lists(spans: Spans) -> list[list[tuple[int, int]]]:
    parts = np.split(spans.pairs, spans.offsets[1:-1])
    return [[tuple(pair) for pair in part.tolist()] for part in parts][: len(spans.offsets) - 1]


@given(SPANS, st.data())
def test_ragged_spans(values: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    import pyarrow as pa

    spans = spans_of(values)
    assert as_lists(Spans.from_column(pa.chunked_array([spans.to_column()]))) == values
    assert as_lists(spans.one_of_each(last=True)) == [value[-1:] for value in values]
    assert as_lists(spans.one_of_each(last=False)) == [value[:1] for value in values]
    assert spans.supervised().tolist() == [sum(end - start for start, end in value) for value in values]
    if values:
        rows = data.draw(st.lists(st.integers(0, len(values) - 1)))
        assert as_lists(spans.take(np.array(rows, dtype=np.int64))) == [values[row] for row in rows]


@pytest.mark.parametrize(("rule", "kept"), [("stored", STORED), ("last_turn", [(9, 10)]), ("first_turn", [(2, 4)])])
def test_rules_derive_masks_from_the_index(storage: Storage, rule: str, kept: list[tuple[int, int]]) -> None:
    plain, reader = CacheReader(storage), CacheReader(storage, masks=rule)
    wanted = np.zeros(12, dtype=bool)
    for start, end in kept:
        wanted[start:end] = True
    for position in range(COUNT):
        sample = reader.read(position)
        assert reader.loss_mask(position).tolist() == sample.loss_mask.tolist() == wanted.tolist()
        stored = plain.read(position)
        assert np.array_equal(sample.hidden_states, stored.hidden_states)
        assert np.array_equal(sample.last_hidden_state, stored.last_hidden_state), "rows belong to the stored mask"
    assert reader.supervised_tokens.tolist() == [int(wanted.sum())] * COUNT


def test_a_table_of_masks_leaves_the_shards_alone(storage: Storage) -> None:
    before = {info.name: storage.read(info.name) for info in storage.list("shards/")}
    masks = {f"s{number:04d}": [(5, 7)] if number else [] for number in reversed(range(COUNT))}
    assert write_masks(storage, "short-answers", {**masks, "of another cache": [(0, 99)]}) == (
        "masks/short-answers.parquet"
    )
    reader = CacheReader(storage, masks="short-answers")
    assert np.flatnonzero(reader.loss_mask(2)).tolist() == [5, 6]
    assert reader.supervised_tokens.tolist() == [0, 2, 2, 2]
    assert {info.name: storage.read(info.name) for info in storage.list("shards/")} == before
    with pytest.raises(AlreadyExists):
        write_masks(storage, "short-answers", masks)


@pytest.mark.parametrize(
    ("name", "spans", "error", "message"),
    [
        ("lacking", None, CacheError, "no masks for 1 of the cache's 4 samples, 's0003' among them"),
        ("outside", [(9, 13)], CacheError, "sample 's0001': spans must ascend without touching, within its 12 tokens"),
        ("negative", [(-1, 3)], CacheError, "must ascend"),
        ("empty", [(3, 3)], CacheError, "must ascend"),
        ("unordered", [(5, 7), (2, 3)], CacheError, "must ascend"),
        ("touching", [(5, 6), (6, 8)], CacheError, "must ascend"),
        ("more", [(5, 9)], CacheMismatch, r"sample 's0001': \[5, 9\) is not wholly supervised in the cache"),
        ("before", [(0, 1)], CacheMismatch, r"\[0, 1\) is not wholly supervised"),
        ("between", [(4, 5)], CacheMismatch, r"\[4, 5\) is not wholly supervised"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    storage: Storage, name: str, spans: list[tuple[int, int]] | None, error: type[CacheError], message: str
) -> None:
    masks = {f"s{number:04d}": [(9, 10)] for number in range(COUNT)}
    if spans is None:
        del masks["s0003"]
    else:
        masks["s0001"] = spans
    write_masks(storage, name, masks)
    with pytest.raises(error, match=message):
        CacheReader(storage, masks=name)


def test_with_all_last_hidden_states_more_may_be_supervised(tmp_path: Path) -> None:
    storage = build(tmp_path / "cache", last_hidden="all")
    write_masks(storage, "everything", {f"s{number:04d}": [(0, 12)] for number in range(COUNT)})
    assert CacheReader(storage, masks="everything").loss_mask(0).all()


def test_unknown_and_damaged_tables_are_named(storage: Storage) -> None:
    with pytest.raises(NotFound, match=r"masks/other\.parquet does not exist; masks is one of stored, last_turn"):
        CacheReader(storage, masks="other")
    with pytest.raises(CacheError, match="wanted one of stored, last_turn, first_turn, or a name"):
        CacheReader(storage, masks="../other")
    with pytest.raises(CacheError, match="wanted one of"):
        write_masks(storage, "last_turn", {})
    storage.put("masks/broken.parquet", b"PAR1")
    with pytest.raises(CacheError, match="damaged mask table"):
        CacheReader(storage, masks="broken")
