from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cache_store import codec
from cache_store.audit import verify_cache
from cache_store.calibration import (
    CALIBRATION,
    Calibration,
    calibrate,
    commit_calibration,
    load_calibration,
)
from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch, ShardCorrupt
from cache_store.ledger import seal
from cache_store.manifest import MANIFEST, Manifest
from cache_store.reader import CacheReader
from cache_store.schema import TargetSample
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import build_cache, make_sample, make_spec

SPEC = make_spec(codec="i8cr", last_codec="i8cr")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "cache"))


def samples(count: int = 4) -> list[TargetSample]:
    return [make_sample(SPEC, number, tokens=30) for number in range(count)]


def test_scales_follow_the_channels_and_not_one_massive_token() -> None:
    rng = np.random.default_rng(0)
    true = np.geomspace(0.5, 8.0, 16)
    states = (rng.standard_normal((2, 400, 16)) * true).astype(np.float32)
    plain = calibrate(SPEC, [make_sample(SPEC, 0, tokens=400, hidden_states=codec.to_bits(states))]).captured
    states[:, 0, 2] = 25000.0
    massive = calibrate(SPEC, [make_sample(SPEC, 0, tokens=400, hidden_states=codec.to_bits(states))]).captured
    assert plain is not None
    assert massive is not None
    assert np.allclose(plain[0] / plain[0, 0], true / true[0], rtol=0.25)
    assert massive[0, 2] < 2 * plain[0, 2], "a plain mean square would give 1,250 times the others' size"


def test_only_calibrated_fields_have_scales_and_a_dead_channel_has_a_floor() -> None:
    spec = make_spec(codec="i8cr")
    states = make_sample(spec, 0).hidden_states.copy()
    states[:, :, 5] = 0
    found = calibrate(spec, [make_sample(spec, 0, hidden_states=states)])
    assert found.last is None
    assert found.captured is not None
    assert (found.captured > 0).all()


def test_same_samples_same_scales_and_the_text_gives_them_back() -> None:
    found = calibrate(SPEC, samples())
    assert found.to_json() == calibrate(SPEC, samples()).to_json()
    back = Calibration.from_json(found.to_json(), SPEC)
    assert np.array_equal(back.captured, found.captured)
    assert np.array_equal(back.last, found.last)
    assert back.digest == found.digest != calibrate(SPEC, samples(3)).digest


def test_the_first_scales_win_and_everybody_uses_them(storage: Storage) -> None:
    create_cache(storage, SPEC)
    first = commit_calibration(storage, SPEC, calibrate(SPEC, samples(2)))
    second = commit_calibration(storage, SPEC, calibrate(SPEC, samples(4)))
    assert second.digest == first.digest == load_calibration(storage, SPEC).digest
    records = []
    for number in range(2):  # two actors
        with CacheWriter(storage, SPEC) as writer:
            writer.write(make_sample(SPEC, number))
        records += writer.committed
    assert {record.calibration for record in records} == {first.digest}
    assert {error.tensor for error in records[0].errors} == {"0", "2", "last"}
    manifest = seal(storage, expected_ids=None)
    assert manifest.calibration == first.digest
    assert 0 < max(error.max for error in manifest.errors) <= 0.01
    assert sum(error.rows for error in manifest.errors if error.tensor == "0") == manifest.num_tokens


def test_nothing_is_written_or_read_without_scales(storage: Storage) -> None:
    create_cache(storage, SPEC)
    with pytest.raises(CacheIncomplete, match=r"no calibration\.json yet"):
        CacheWriter(storage, SPEC)
    with pytest.raises(CacheError, match="no samples"):
        calibrate(SPEC, [])
    assert seal(storage, expected_ids=[]).calibration is None
    assert len(CacheReader(storage)) == 0


def test_lost_scales_are_refused(storage: Storage) -> None:
    build_cache(storage, SPEC, 3)
    storage.delete(CALIBRATION)
    with pytest.raises(CacheMismatch, match="the cache has None"):
        CacheReader(storage)
    assert next(finding.kind for finding in verify_cache(storage).findings) == "bad-calibration"
    storage.delete(MANIFEST)
    with pytest.raises(ShardCorrupt, match="needs the calibrated"):
        CacheReader(storage, allow_unsealed=True).read(0)


def test_exchanged_scales_are_refused(storage: Storage) -> None:
    build_cache(storage, SPEC, 3)
    other = calibrate(SPEC, samples(1))
    storage.put(CALIBRATION, other.to_json().encode())
    with pytest.raises(CacheMismatch, match="sealed with channel scales"):
        CacheReader(storage)
    with pytest.raises(CacheMismatch, match="was written with channel scales"):
        seal(storage, expected_ids=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.pop("last"), "fields"),
        (lambda data: data.update(last=None), "last is missing"),
        (lambda data: data.update(captured=[[1.0] * 16]), r"shape \[1, 16\], wanted \[2, 16\]"),
        (lambda data: data["last"][0].__setitem__(3, 0.0), "positive"),
        (lambda data: data["last"][0].__setitem__(3, "x"), "list of lists"),
        (lambda data: data["last"][0].pop(), r"shape \[1, 15\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused(edit: object, message: str) -> None:
    data = json.loads(calibrate(SPEC, samples()).to_json())
    edit(data)  # type: ignore[operator]
    with pytest.raises(CacheError, match=message):
        Calibration.from_json(json.dumps(data), SPEC)


def test_scales_beside_exact_codecs_are_refused() -> None:
    with pytest.raises(CacheError, match="captured is there"):
        Calibration.from_json(calibrate(SPEC, samples()).to_json(), make_spec())


def test_a_bounded_loss_cache_reads_back_within_its_bound(storage: Storage) -> None:
    written = build_cache(storage, make_spec(codec="f8r", last_codec="i8cr", last_hidden="all"), 5)
    reader = CacheReader(storage)
    for sample in written:
        found = reader.read_id(sample.sample_id)
        for name, bound in (("hidden_states", 0.04), ("last_hidden_state", 0.01)):
            a, b = (codec.to_float(getattr(item, name)).astype(np.float64) for item in (found, sample))
            error = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
            assert 0 < error.max() <= bound + 1e-6
    assert isinstance(reader.manifest, Manifest)
    assert {error.tensor for error in reader.manifest.errors} == {"0", "2", "last"}
