from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch
from cache_store.mixture import SampleSet, Source, describe
from cache_store.reader import CacheReader
from cache_store.schema import CacheSpec
from cache_store.selection import Selection
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import IDENTITY, build_cache, make_sample, make_spec

COUNTS = (7, 5)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Storage]:
    """Two caches of one target, built with other prompts and another codec."""
    root = tmp_path_factory.mktemp("mix")
    storages = []
    for name, count, spec in zip("ab", COUNTS, (make_spec(), other_spec(codec="raw")), strict=True):
        storage = open_storage(str(root / name))
        build_cache(storage, spec, count)
        storages.append(storage)
    return storages


def other_spec(**changes: object) -> CacheSpec:
    return make_spec(**{"identity": {**IDENTITY, "prompts": "others", "temperature": 1.0}, **changes})


def epoch_of(samples: SampleSet, epoch: int) -> list[tuple[str, str]]:
    found = [samples.find(epoch, position) for position in range(len(samples))]
    return [(reader.storage.url, reader.sample_id(position)) for reader, position in found]


def test_one_cache_is_itself(caches: list[Storage]) -> None:
    samples = SampleSet([Source(storage=caches[0])])
    reader = CacheReader(caches[0])
    assert len(samples) == COUNTS[0]
    for epoch in (0, 3):
        assert [name for _, name in epoch_of(samples, epoch)] == reader.ids
    epochs, positions = np.zeros(COUNTS[0], np.int64), np.arange(COUNTS[0])
    assert samples.tokens(epochs, positions).tolist() == reader.tokens.tolist()
    assert samples.stored_bytes(epochs, positions) == reader.lengths.sum()
    assert samples.loss_mask(2, 4).tolist() == reader.loss_mask(4).tolist()


@settings(max_examples=20, deadline=None)
@given(weights=st.tuples(st.floats(0.15, 3), st.floats(0.15, 3)), epochs=st.integers(1, 12))
def test_weights_are_kept_and_samples_take_turns(
    caches: list[Storage], weights: tuple[float, float], epochs: int
) -> None:
    sources = [Source(storage=storage, weight=weight) for storage, weight in zip(caches, weights, strict=True)]
    samples, again = SampleSet(sources), SampleSet(sources)
    seen: Counter[tuple[str, str]] = Counter()
    for epoch in range(epochs):
        of_epoch = epoch_of(samples, epoch)
        assert of_epoch == epoch_of(again, epoch), "a pure function of caches and weights"
        seen.update(of_epoch)
        per_cache = Counter(url for url, _ in of_epoch)
        for storage, weight, count in zip(caches, weights, COUNTS, strict=True):
            assert per_cache[storage.url] == round(weight * count)
    for storage in caches:
        times = [seen[storage.url, name] for name in CacheReader(storage).ids]
        assert max(times) - min(times) <= 1, "no sample falls behind"


def test_a_part_of_a_round_is_not_the_start_of_the_alphabet(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(hidden_size=1), 40)
    samples = SampleSet([Source(storage=storage, weight=0.5)])
    first = {name for _, name in epoch_of(samples, 0)}
    assert 5 < sum(name < "s0020" for name in first) < 15
    assert first.isdisjoint(name for _, name in epoch_of(samples, 1))
    assert first == {name for _, name in epoch_of(samples, 2)}


def test_everything_is_counted(caches: list[Storage]) -> None:
    chosen = Selection(max_tokens=15)
    samples = SampleSet([Source(storage=caches[0], selection=chosen, weight=2.0), Source(storage=caches[1])])
    first, second = samples.reports
    assert (first.total, second.total) == COUNTS
    assert first.used + sum(first.dropped.values()) == first.total
    assert first.per_epoch == 2 * first.used
    assert len(samples) == first.per_epoch + second.per_epoch
    line = describe(first)
    assert f"{first.used} of 7 samples, {7 - first.used} longer than 15 tokens, {2 * first.used} per epoch" in line
    assert describe(second) == f"{caches[1].url}: 5 of 5 samples"


def test_masks_apply_to_their_own_cache(caches: list[Storage]) -> None:
    samples = SampleSet([Source(storage=caches[0], masks="last_turn")])
    assert samples.loss_mask(0, 0).any()
    facts = samples.identity()
    assert facts["cache.masks"] == "last_turn"
    assert facts != SampleSet([Source(storage=caches[0])]).identity()


def test_identity_tells_what_a_resumed_run_must_find(caches: list[Storage]) -> None:
    def identity(*sources: Source) -> dict[str, object]:
        return SampleSet(sources).identity()

    plain = Source(storage=caches[0])
    others = [
        Source(storage=caches[0], weight=2.0),
        Source(storage=caches[1]),
        Source(storage=caches[0], selection=Selection(max_tokens=15)),
    ]
    base = identity(plain)
    assert base == identity(Source(storage=caches[0], selection=Selection(max_tokens=10_000)))
    assert all(identity(other) != base for other in others)
    assert set(identity(plain, others[1])) > set(base)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_ids": (0, 3)}, "layer_ids"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"identity": {**IDENTITY, "weights": "w1"}}, "identity.weights"),
        ({"identity": {name: value for name, value in IDENTITY.items() if name != "template"} | {"norm": "x"}}, "norm"),
    ],
)
def test_other_targets_and_layers_cannot_be_mixed(
    caches: list[Storage], tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    spec, storage = other_spec(**changes), open_storage(str(tmp_path / "other"))
    build_cache(storage, spec, 1)
    with pytest.raises(CacheMismatch, match=f"cannot be mixed: .*{field} is "):
        SampleSet([Source(storage=caches[0]), Source(storage=storage)])


def test_nothing_left_and_impossible_weights_are_refused(caches: list[Storage]) -> None:
    with pytest.raises(CacheIncomplete, match="0 of 7 samples, 7 longer than 1 tokens"):
        SampleSet([Source(storage=caches[0], selection=Selection(max_tokens=1))])
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(CacheError, match="wanted a positive number"):
            SampleSet([Source(storage=caches[0], weight=weight)])
    with pytest.raises(CacheError, match="at least one cache"):
        SampleSet([])
    with pytest.raises(CacheError, match="outside the 7 samples"):
        SampleSet([Source(storage=caches[0])]).find(0, 7)


def test_a_cache_that_grew_keeps_its_samples_on_their_sides(tmp_path: Path) -> None:
    from cache_store.ledger import seal

    storage, spec = open_storage(str(tmp_path / "cache")), make_spec()
    create_cache(storage, spec)
    chosen = Selection(split="held_out", held_out_fraction=0.5)
    sides: list[set[str]] = []
    for numbers in (range(10), range(10, 30)):
        with CacheWriter(storage, spec) as writer:
            for number in numbers:
                writer.write(make_sample(spec, number))
        seal(storage, expected_ids=None)
        sides.append({name for _, name in epoch_of(SampleSet([Source(storage=storage, selection=chosen)]), 0)})
    assert sides[0] == {name for name in sides[1] if name < "s0010"}
