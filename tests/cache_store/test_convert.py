from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store import cli, codec
from cache_store.audit import verify_cache
from cache_store.calibration import load_calibration
from cache_store.convert import Changes, StoredCache, convert
from cache_store.errors import CacheError, CacheIncomplete, CacheMismatch
from cache_store.ledger import Ledger, Reject, seal
from cache_store.reader import CacheReader
from cache_store.schema import TargetSample
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter
from tests.cache_store.samples import build_cache, make_spec

COUNT = 7


@pytest.fixture
def places(tmp_path: Path) -> tuple[Storage, Storage]:
    return open_storage(str(tmp_path / "source")), open_storage(str(tmp_path / "target"))


def same(found: TargetSample, wanted: TargetSample) -> bool:
    names = ("input_ids", "loss_mask", "hidden_states", "last_hidden_state")
    texts = found.sample_id == wanted.sample_id and found.metadata == wanted.metadata
    return texts and all(np.array_equal(getattr(found, name), getattr(wanted, name)) for name in names)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    a, b = codec.to_float(found).astype(np.float64), codec.to_float(wanted).astype(np.float64)
    size = np.linalg.norm(b, axis=-1)
    return float((np.linalg.norm(a - b, axis=-1) / np.where(size == 0, 1.0, size)).max())


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("tag", ["bss1", "raw"])
def test_exact_caches_convert_into_each_other_bit_for_bit(places: tuple[Storage, Storage], form: str, tag: str) -> None:
    source, target = places
    build_cache(source, make_spec(last_hidden="all"), COUNT)
    manifest = convert(StoredCache(source), target, Changes(format=form, codec=tag, last_codec=tag, shard_bytes=5000))
    before, after = CacheReader(source), CacheReader(target)
    assert after.ids == before.ids
    assert (after.spec.format, after.spec.codec) == (form, tag)
    assert all(same(after.read(n), before.read(n)) for n in range(COUNT))
    assert verify_cache(target).findings == ()
    assert (manifest.num_samples, manifest.errors) == (COUNT, ())
    assert len(manifest.shards) > 1


def test_lossless_to_int8_measures_its_scales_and_errors(places: tuple[Storage, Storage]) -> None:
    source, target = places
    build_cache(source, make_spec(), COUNT)
    manifest = convert(StoredCache(source), target, Changes(codec="i8cr", format="tar"))
    before, after = CacheReader(source), CacheReader(target)
    errors = [relative(after.read(n).hidden_states, before.read(n).hidden_states) for n in range(COUNT)]
    assert 0 < max(errors) <= 0.01 + 1e-6
    assert max(error.max for error in manifest.errors) == pytest.approx(max(errors), rel=1e-3)
    assert after.spec.last_codec == "bss1", "exact unless asked"
    assert np.array_equal(after.read(0).last_hidden_state, before.read(0).last_hidden_state)
    assert after.spec.identity["converted_from"][0]["codec"] == "bss1"


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("layers", [None, (2,)])
def test_lossy_planes_are_copied_and_not_coded_twice(
    places: tuple[Storage, Storage], form: str, layers: tuple[int, ...] | None
) -> None:
    source, target = places
    build_cache(source, make_spec(codec="i8cr", last_codec="i8cr", layer_ids=(0, 2)), COUNT)
    convert(StoredCache(source), target, Changes(format=form, layer_ids=layers))
    before, after = CacheReader(source), CacheReader(target)
    chosen = slice(None) if layers is None else slice(1, 2)
    for number in range(COUNT):
        assert np.array_equal(after.read(number).hidden_states, before.read(number).hidden_states[chosen])
        assert np.array_equal(after.read(number).last_hidden_state, before.read(number).last_hidden_state)
    assert before.manifest is not None
    assert after.manifest is not None
    kept = {error.tensor: error for error in before.manifest.errors}
    for error in after.manifest.errors:
        wanted = kept[error.tensor]
        assert (error.rows, error.outliers, error.max) == (wanted.rows, wanted.outliers, wanted.max)
        assert error.mean == pytest.approx(wanted.mean)
    assert np.array_equal(
        load_calibration(target, after.spec).captured, load_calibration(source, before.spec).captured[chosen]
    )
    assert verify_cache(target).findings == ()


def test_lossy_to_exact_keeps_what_was_decoded_and_says_where_it_is_from(places: tuple[Storage, Storage]) -> None:
    source, target = places
    build_cache(source, make_spec(codec="f8r"), COUNT)
    convert(StoredCache(source), target, Changes(codec="bss1", last_codec="raw"))
    before, after = CacheReader(source), CacheReader(target)
    assert all(same(after.read(n), before.read(n)) for n in range(COUNT))
    assert [origin["codec"] for origin in after.spec.identity["converted_from"]] == ["f8r"]


@pytest.mark.parametrize(
    ("source_settings", "changes", "message"),
    [
        ({"codec": "f8r"}, Changes(codec="i8cr"), "captured layers are f8r already"),
        (
            {"last_codec": "i8cr", "last_hidden": "all"},
            Changes(last_hidden="needed"),
            "last hidden state are i8cr already",
        ),
        ({}, Changes(last_hidden="all"), "only where it is needed"),
        ({}, Changes(layer_ids=(0, 3)), r"layers \[3\] are not in the source, which has \[0, 2\]"),
        ({}, Changes(layer_ids=(2, 0)), "ascending"),
    ],
)
def test_what_a_source_cannot_give_is_refused(
    places: tuple[Storage, Storage], source_settings: dict[str, Any], changes: Changes, message: str
) -> None:
    source, target = places
    build_cache(source, make_spec(**source_settings), 2)
    with pytest.raises(CacheError, match=message):
        convert(StoredCache(source), target, changes)
    assert target.list("") == []


def test_needed_rows_alone_are_kept_of_a_full_cache(places: tuple[Storage, Storage]) -> None:
    source, target = places
    samples = build_cache(source, make_spec(last_hidden="all"), 3)
    convert(StoredCache(source), target, Changes(last_hidden="needed"))
    for sample in samples:
        rows = np.flatnonzero(sample.loss_mask[1:])
        wanted = np.zeros_like(sample.last_hidden_state)
        wanted[rows] = sample.last_hidden_state[rows]
        assert np.array_equal(CacheReader(target).read_id(sample.sample_id).last_hidden_state, wanted)


def test_an_interrupted_conversion_continues(places: tuple[Storage, Storage], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = places
    build_cache(source, make_spec(), COUNT)
    changes = Changes(format="tar", codec="i8cr", shard_bytes=1)
    write = CacheWriter.write
    written: list[str] = []

    def dies(self: CacheWriter, sample: TargetSample, *rest: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        write(self, sample, *rest)
        written.append(sample.sample_id)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            convert(StoredCache(source), target, changes)
    assert len(Ledger(target).committed_ids()) == 3
    with pytest.raises(CacheIncomplete):
        CacheReader(target)
    steps: list[tuple[int, int]] = []
    manifest = convert(StoredCache(source), target, changes, lambda done, total: steps.append((done, total)))
    assert steps == [(4, 7), (5, 7), (6, 7), (7, 7)]
    assert (manifest.num_samples, manifest.duplicates) == (COUNT, 0)
    with pytest.raises(CacheMismatch, match="codec"):
        convert(StoredCache(source), target, replace(changes, codec="raw"))


def test_rejects_stay_accounted_for(places: tuple[Storage, Storage]) -> None:
    source, target = places
    build_cache(source, make_spec(), 2, sealed=False)
    Ledger(source).reject([Reject(sample_id="gone", stage="regenerate", reason="refused")])
    seal(source, expected_ids=None)
    manifest = convert(StoredCache(source), target, Changes(format="tar"))
    assert manifest.rejects == {"regenerate": {"refused": 1}}
    assert (manifest.num_samples, manifest.rejected) == (2, 1)


def test_an_empty_cache_converts(places: tuple[Storage, Storage]) -> None:
    source, target = places
    build_cache(source, make_spec(), 0)
    assert convert(StoredCache(source), target, Changes(codec="i8cr")).num_samples == 0
    assert len(CacheReader(target)) == 0


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    build_cache(open_storage(source), make_spec(), 3)
    arguments = ["convert", source, target, "--format", "tar", "--codec", "i8cr", "--layers", "2", "--shard-mb", "1"]
    assert cli.main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["samples"], facts["rejected"], [error["tensor"] for error in facts["errors"]]) == (3, 0, ["2"])
    assert cli.main(arguments) == 0, "again: nothing is left to do"
    assert "values kept exactly" in capsys.readouterr().out
    assert cli.main(["verify", target]) == 0
    for place in (source, f"{tmp_path}/b/../a", f"{source}/shards/new", str(tmp_path)):
        assert cli.main(["convert", source, place]) == 1
        assert "a place of its own" in capsys.readouterr().err
    assert cli.main(["convert", source, f"{source}-2"]) == 0
    capsys.readouterr()
    assert cli.main(["convert", source, target, "--layers", "x"]) == 1
