from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store import codec
from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch, NotFound, ShardCorrupt
from cache_store.ledger import Ledger, seal
from cache_store.manifest import MANIFEST, SPEC
from cache_store.reader import CacheReader
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import needed_positions
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import build_cache, make_sample, make_spec

pytestmark = pytest.mark.usefixtures("both_formats")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "cache"))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("tag", ["bss1", "raw"])
@pytest.mark.parametrize("last_hidden", ["needed", "all"])
def test_samples_come_back_exactly(storage: Storage, tag: str, last_hidden: str) -> None:
    samples = build_cache(storage, make_spec(codec=tag, last_hidden=last_hidden, shard_bytes=4000), 11)
    reader = CacheReader(storage)
    assert reader.ids == [sample.sample_id for sample in samples]
    assert len(reader.shards) > 2
    for position, sample in enumerate(samples):
        found = reader.read(position)
        assert found.sample_id == sample.sample_id
        assert found.metadata == sample.metadata
        for name in ("input_ids", "loss_mask", "hidden_states"):
            array = getattr(found, name)
            assert np.array_equal(array, getattr(sample, name))
            assert array.dtype == getattr(sample, name).dtype
        kept = np.zeros(len(sample.input_ids), bool)
        kept[needed_positions(sample.loss_mask) if last_hidden == "needed" else slice(None)] = True
        assert np.array_equal(found.last_hidden_state[kept], sample.last_hidden_state[kept])
        assert not found.last_hidden_state[~kept].any()
        assert np.array_equal(reader.loss_mask(position), sample.loss_mask)
        assert reader.tokens[position] == len(sample.input_ids)
        assert reader.supervised_tokens[position] == sample.loss_mask.sum()
        assert np.array_equal(reader.read_id(sample.sample_id).input_ids, sample.input_ids)


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_a_sample_holds_nothing_but_its_own_arrays(tmp_path: Path, form: str) -> None:
    storage = open_storage(str(tmp_path / form))
    build_cache(storage, make_spec(format=form), 2)
    sample = CacheReader(storage).read(1)
    states = sample.hidden_states.nbytes + sample.last_hidden_state.nbytes
    for array, kept in (
        (sample.input_ids, sample.input_ids.nbytes),
        (sample.loss_mask, sample.loss_mask.nbytes),
        (sample.hidden_states, states),
        (sample.last_hidden_state, states),
    ):
        owner = array if array.base is None else array.base
        assert isinstance(owner, np.ndarray)
        assert owner.nbytes == kept, "a view keeps the whole stored sample in memory"


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("tag", ["bss1", "raw", "f8r"])
def test_a_later_read_leaves_the_samples_of_earlier_ones_alone(tmp_path: Path, form: str, tag: str) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(format=form, codec=tag), 5)
    reader, alone = CacheReader(storage), CacheReader(storage)
    together = [reader.read(position) for position in range(5)]  # all through the memory that the thread keeps
    for position, sample in enumerate(together):
        fresh = alone.decode(position, alone.fetch(position))
        assert (sample.sample_id, sample.metadata) == (fresh.sample_id, fresh.metadata)
        for name in ("input_ids", "loss_mask", "hidden_states", "last_hidden_state"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(fresh, name), err_msg=name)


def test_mask_with_several_turns_comes_from_the_index(storage: Storage) -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], bool)
    build_cache(storage, make_spec(), 1, tokens=8, loss_mask=mask)
    reader = CacheReader(storage)
    calls = count_reads(storage_of(reader))
    assert np.array_equal(reader.loss_mask(0), mask)
    assert calls == []


def storage_of(reader: CacheReader) -> Storage:
    return reader.storage


def count_reads(storage: Storage) -> list[tuple[str, int, int]]:
    """Ranged reads made through this storage from now on."""
    calls: list[tuple[str, int, int]] = []
    read_range, read_into = storage.read_range, storage.read_into

    def counting(name: str, offset: int, length: int) -> bytes:
        calls.append((name, offset, length))
        return read_range(name, offset, length)

    def counting_into(name: str, offset: int, out: memoryview) -> None:
        calls.append((name, offset, len(out)))
        read_into(name, offset, out)

    storage.read_range = counting  # type: ignore[method-assign]
    storage.read_into = counting_into  # type: ignore[method-assign]
    return calls


def test_a_sample_costs_one_ranged_read_of_exactly_its_bytes(storage: Storage) -> None:
    build_cache(storage, make_spec(), 6)
    record = Ledger(storage).records()[0]
    reader = CacheReader(storage)
    calls = count_reads(storage)
    order = (4, 2, 5, 0)
    for position in order:
        reader.read(position)
    wanted = [record.samples[position] for position in order]
    assert calls == [(record.name, sample.offset, sample.length) for sample in wanted]


def test_text_alone_is_cheap(storage: Storage) -> None:
    spec = make_spec(hidden_size=256)
    samples = build_cache(storage, spec, 2, tokens=800)
    reader = CacheReader(storage)
    reader.read(0, states=False)
    calls = count_reads(storage)
    found = reader.read(1, states=False)
    assert np.array_equal(found.input_ids, samples[1].input_ids)
    assert found.metadata == samples[1].metadata
    assert found.hidden_states.size == found.last_hidden_state.size == 0
    assert sum(length for _, _, length in calls) < samples[1].hidden_states.nbytes / 50


def corrupt_state_byte(storage: Storage) -> str:
    """Flip one byte of a low plane, which Parquet itself cannot notice; returns the sample's id."""
    record = Ledger(storage).records()[0]
    sample = record.samples[1]
    assert storage.local_root is not None
    flip(storage.local_root / record.name, sample.offset + sample.length - 5)
    return sample.sample_id


@pytest.mark.parametrize("policy", ["always", "first"])
def test_flipped_byte_is_named(storage: Storage, policy: Any) -> None:
    build_cache(storage, make_spec(), 4)
    sample_id = corrupt_state_byte(storage)
    reader = CacheReader(storage, verify=policy)
    with pytest.raises(ShardCorrupt, match=r"shards/part-\w+\.\w+: sample 's0001': crc32c .*, record says") as caught:
        reader.read_id(sample_id)
    assert "\n" not in str(caught.value)
    assert reader.read(0).sample_id == "s0000", "the others stay readable"


def test_policy_never_does_not_look(storage: Storage) -> None:
    build_cache(storage, make_spec(), 4)
    sample_id = corrupt_state_byte(storage)
    assert CacheReader(storage, verify="never").read_id(sample_id).sample_id == sample_id


@pytest.mark.parametrize(("policy", "second_read_fails"), [("first", False), ("always", True)])
def test_policies_differ_in_the_second_read(storage: Storage, policy: Any, second_read_fails: bool) -> None:
    build_cache(storage, make_spec(), 4)
    reader = CacheReader(storage, verify=policy)
    reader.read(1)
    corrupt_state_byte(storage)
    if second_read_fails:
        with pytest.raises(ShardCorrupt):
            reader.read(1)
    else:
        reader.read(1)


def test_corrupt_once_is_read_again(storage: Storage) -> None:
    samples = build_cache(storage, make_spec(), 4)
    reader = CacheReader(storage)
    read_into = storage.read_into
    damaged: list[str] = []

    def once(name: str, offset: int, out: memoryview) -> None:
        read_into(name, offset, out)
        if not damaged:
            damaged.append(name)
            out[:] = bytes(len(out))

    storage.read_into = once  # type: ignore[method-assign]
    assert np.array_equal(reader.read(2).hidden_states, samples[2].hidden_states)
    assert len(damaged) == 1


def test_missing_shard_is_named(storage: Storage) -> None:
    build_cache(storage, make_spec(), 2)
    storage.delete(storage.list("shards/")[0].name)
    with pytest.raises(ShardCorrupt, match=r"part-\w+\.\w+.* does not exist"):
        CacheReader(storage).read(0)


@pytest.mark.parametrize("field", ["hidden_states", "last_hidden_state"])
def test_states_that_are_not_finite_are_refused(storage: Storage, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    good = make_sample(spec, 0, tokens=8)
    bits = getattr(good, field).copy()
    bits[..., 6, 3] = 0x7F80
    with monkeypatch.context() as patch:  # a writer that does not check
        patch.setattr("cache_store.writer.check_sample", lambda *_: None)
        build_cache(storage, spec, 1, tokens=8, **{field: bits})
    with pytest.raises(ShardCorrupt, match=r"\d infinite or NaN values"):
        CacheReader(storage).read(0)


def test_decoding_a_cut_sample(storage: Storage) -> None:
    spec = make_spec()
    sample = build_cache(storage, spec, 1, tokens=12)[0]
    reader = CacheReader(storage)
    hidden = np.full((2, 5, 16), 9, np.uint16)
    last = np.zeros((5, 16), np.uint16)
    reader.decode_into(0, reader.fetch(0), hidden, last)
    assert np.array_equal(hidden, sample.hidden_states[:, :5])
    assert np.array_equal(last[3:], sample.last_hidden_state[3:5])
    assert not last[:3].any()


def test_build_in_progress(storage: Storage) -> None:
    build_cache(storage, make_spec(), 3, sealed=False)
    with pytest.raises(CacheIncomplete, match="is not sealed: its build has not finished"):
        CacheReader(storage)
    reader = CacheReader(storage, allow_unsealed=True)
    assert reader.ids == ["s0000", "s0001", "s0002"]
    assert reader.manifest is None
    assert reader.read(2).sample_id == "s0002"


def test_replaced_settings_are_noticed(storage: Storage) -> None:
    spec = make_spec()
    build_cache(storage, spec, 2)
    storage.put(SPEC, make_spec(identity={**spec.identity, "template": "t1"}).to_json().encode())
    with pytest.raises(CacheMismatch, match="one of the two was replaced"):
        CacheReader(storage)


def test_damaged_index_is_named(storage: Storage) -> None:
    build_cache(storage, make_spec(), 2)
    assert storage.local_root is not None
    flip(storage.local_root / storage.list("index/")[0].name, 20)
    with pytest.raises(ShardCorrupt, match=r"index/\w+\.parquet: crc32c .*, manifest says"):
        CacheReader(storage)


def test_what_is_not_there(storage: Storage) -> None:
    with pytest.raises(NotFound, match="holds no Target Cache"):
        CacheReader(storage)
    build_cache(storage, make_spec(), 2)
    reader = CacheReader(storage)
    with pytest.raises(NotFound, match="no sample 'nobody' among 2"):
        reader.read_id("nobody")
    for position in (-1, 2):
        with pytest.raises(CacheError, match="outside the cache's 2 samples"):
            reader.read(position)
    with pytest.raises(CacheError, match="verify is 'sometimes'"):
        CacheReader(storage, verify="sometimes")  # type: ignore[arg-type]
    storage.put(MANIFEST, b"{}")
    with pytest.raises(CacheError, match=r"manifest\.json: format_version None"):
        CacheReader(storage)


def test_many_shards_keep_few_footers(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_store.reader.LAYOUTS_KEPT", 2)
    build_cache(storage, make_spec(shard_bytes=1), 6)
    reader = CacheReader(storage)
    for position in (0, 1, 2, 3, 4, 5, 0):
        reader.read(position)
    assert not reader._layouts, "a whole sample takes no footer"
    for position in (0, 1, 2, 3, 4, 5, 0):
        reader.read(position, states=False)
    assert len(reader._layouts) == 2


def test_memory_storage_and_duplicate_ids(tmp_path: Path) -> None:
    storage = open_storage(f"memory://{tmp_path.name}")
    spec: CacheSpec = make_spec()
    create_cache(storage, spec)
    written: list[TargetSample] = [make_sample(spec, number) for number in range(4)]
    for part in (written[:3], written[1:]):
        with CacheWriter(storage, spec) as writer:
            for sample in part:
                writer.write(sample)
    seal(storage, expected_ids=None)
    reader = CacheReader(pickle.loads(pickle.dumps(storage)))
    assert [reader.read(position).sample_id for position in range(len(reader))] == [s.sample_id for s in written]
    assert codec.count_nonfinite(reader.read(0).hidden_states) == 0
