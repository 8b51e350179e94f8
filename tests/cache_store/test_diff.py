from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.diff import CacheDiff, diff_caches
from cache_store.reader import CacheReader
from cache_store.schema import CacheSpec
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import make_sample, make_spec


def build(folder: Path, spec: CacheSpec, numbers: list[int], **changes: Any) -> CacheReader:
    storage = open_storage(str(folder))
    create_cache(storage, spec)
    with CacheWriter(storage, spec) as writer:
        for number in numbers:
            own = changes if number == numbers[-1] else {}
            writer.write(make_sample(spec, number, tokens=12, **own))
    return CacheReader(storage, allow_unsealed=True)


def compare(tmp_path: Path, spec: CacheSpec | None = None, *, values: bool = False, **changes: Any) -> CacheDiff:
    a = build(tmp_path / "a", make_spec(), [0, 1, 2])
    b = build(tmp_path / "b", spec or make_spec(), [2, 0, 1], **changes)
    return diff_caches(a, b, values=values)


@pytest.mark.parametrize("values", [False, True])
def test_the_same_samples_in_another_order_are_the_same(tmp_path: Path, values: bool) -> None:
    found = compare(tmp_path, values=values)
    assert found.same
    assert (found.common, found.compared) == (3, "values" if values else "checksums")


def test_ids_of_one_cache_only(tmp_path: Path) -> None:
    a, b = build(tmp_path / "a", make_spec(), [0, 1]), build(tmp_path / "b", make_spec(), [1, 2])
    found = diff_caches(a, b)
    assert (found.only_a, found.only_b, found.common) == (("s0000",), ("s0002",), 1)
    assert not found.same


@pytest.mark.parametrize("values", [False, True])
def test_one_bit_of_one_state(tmp_path: Path, values: bool) -> None:
    states = make_sample(make_spec(), 1, tokens=12).hidden_states.copy()
    states[1, 7, 3] ^= 1
    found = compare(tmp_path, hidden_states=states, values=values)
    assert found.content == ("s0001",)
    assert (found.tokens, found.masks) == ((), ())


def test_masks_and_lengths(tmp_path: Path) -> None:
    mask = np.ones(12, bool)
    assert compare(tmp_path / "x", loss_mask=mask).masks == ("s0001",)
    a = build(tmp_path / "a", make_spec(), [0])
    storage = open_storage(str(tmp_path / "b"))
    create_cache(storage, make_spec())
    with CacheWriter(storage, make_spec()) as writer:
        writer.write(make_sample(make_spec(), 0, tokens=13))
    found = diff_caches(a, CacheReader(storage, allow_unsealed=True))
    assert found.tokens == (("s0000", 12, 13),)


def test_settings_are_named(tmp_path: Path) -> None:
    found = compare(tmp_path, make_spec(identity={**make_spec().identity, "seed": 2}))
    assert found.settings == (("identity.seed", 1, 2),)
    assert not found.same


@pytest.mark.parametrize("changes", [{"format": "tar"}, {"codec": "raw"}, {"last_hidden": "all"}])
def test_other_ways_to_store_the_same_values(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = make_spec(**changes)
    found = compare(tmp_path / "x", spec)
    assert (found.compared, found.content) == ("nothing", ())
    assert compare(tmp_path / "y", spec, values=True).content == ()
    states = make_sample(make_spec(), 1, tokens=12).hidden_states.copy()
    states[0, 0, 0] ^= 1
    assert compare(tmp_path / "z", spec, values=True, hidden_states=states).content == ("s0001",)
