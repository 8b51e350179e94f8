"""Prices beside caches that were really built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache_store.calibration import calibrate, commit_calibration
from cache_store.cli import main
from cache_store.ledger import seal
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import make_sample, make_spec

LENGTHS = (150, 220, 220, 400)
SHAPE: dict[str, Any] = {"layer_ids": (0, 1, 2), "hidden_size": 384, "shard_bytes": 1 << 22}


@pytest.fixture(scope="module")
def samples() -> list[TargetSample]:
    spec = make_spec(**SHAPE)
    return [make_sample(spec, number, tokens=tokens) for number, tokens in enumerate(LENGTHS)]


def build(url: Path, spec: CacheSpec, samples: list[TargetSample]) -> int:
    """A sealed cache; returns the bytes of all its objects."""
    storage = open_storage(str(url))
    create_cache(storage, spec)
    if spec.calibrated:
        commit_calibration(storage, spec, calibrate(spec, samples))
    with CacheWriter(storage, spec) as writer:
        for sample in samples:
            writer.write(sample)
    seal(storage, expected_ids=None)
    return sum(info.size for info in storage.list(""))


def histogram(path: Path, samples: list[TargetSample]) -> Path:
    rows = [f"{len(s.input_ids)},{int(s.loss_mask.sum())},1" for s in samples]
    path.write_text("\n".join(["tokens,supervised,samples", *rows]) + "\n")
    return path


def estimate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["estimate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize(("tag", "last"), [("bss1", "bss1"), ("raw", "raw"), ("i8cr", "i8cr"), ("f8r", "bss1")])
@pytest.mark.parametrize("where", ["needed", "all"])
def test_within_three_percent_of_a_built_cache(
    tmp_path: Path,
    samples: list[TargetSample],
    capsys: pytest.CaptureFixture[str],
    form: str,
    tag: str,
    last: str,
    where: str,
) -> None:
    spec = make_spec(**SHAPE, format=form, codec=tag, last_codec=last, last_hidden=where)
    real = build(tmp_path / "cache", spec, samples)
    planned = tmp_path / "cache.json"
    planned.write_text(spec.to_json())
    lengths = histogram(tmp_path / "lengths.csv", samples)
    before = estimate(capsys, planned, "--histogram", lengths)
    assert abs(before["stored_bytes"] / real - 1) < 0.03, (before["stored_bytes"], real)
    # The choice for this very format and codec in the table is the same price.
    chosen = {"format": form, "codec": tag, "last_codec": last, "last_hidden": where, "layers": 3}
    [choice] = [c for c in before["choices"] if all(c[name] == value for name, value in chosen.items())]
    assert choice["stored_bytes"] == before["stored_bytes"]
    after = estimate(capsys, tmp_path / "cache")
    assert abs(after["stored_bytes"] / real - 1) < 0.03, (after["stored_bytes"], real)


def test_choices_cover_every_codec_and_number_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = tmp_path / "cache.json"
    planned.write_text(make_spec(**SHAPE).to_json())
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("samples,tokens,supervised\n100,200,120\n10,4000,3000\n")
    found = estimate(capsys, planned, "--histogram", lengths)
    keys = {(c["format"], c["codec"], c["last_codec"], c["last_hidden"], c["layers"]) for c in found["choices"]}
    assert len(keys) == len(found["choices"]) == 2 * 5 * 2 * 3
    by_key = {(c["format"], c["codec"], c["last_hidden"], c["layers"]): c["stored_bytes"] for c in found["choices"]}
    assert by_key["tar", "raw", "all", 3] > by_key["tar", "raw", "all", 2] > by_key["tar", "bss1", "all", 2]
    assert by_key["parquet", "bss1", "needed", 3] < by_key["parquet", "bss1", "all", 3]
    some = estimate(capsys, planned, "--histogram", lengths, "--layers", "2,5")
    assert {choice["layers"] for choice in some["choices"]} == {2, 5}
    assert found["tokens"] == 60_000
    assert estimate(capsys, planned, "--histogram", lengths, "--max-tokens", 300)["tokens"] == 20_000
    half = estimate(capsys, planned, "--histogram", lengths, "--sample-fraction", 0.5)
    assert (half["tokens"], half["samples"]) == (30_000, 55)
    assert estimate(capsys, planned, "--histogram", lengths, "--tokens", 120_000)["samples"] == 220


def test_the_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = tmp_path / "cache.json"
    planned.write_text(make_spec(**SHAPE).to_json())
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens,supervised,samples\n200,120,100\n")
    assert main(["estimate", str(planned), "--histogram", str(lengths)]) == 0
    shown = capsys.readouterr().out
    for wanted in ("20,000 (60.0% supervised) in 100 samples", "as measured on SmolLM2", "i8cr", "1 layer", "3 layers"):
        assert wanted in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,samples\n1,1\n", "wanted tokens, supervised, samples"),
        ("tokens,supervised,samples\n5,6,1\n", "line 2: 6 supervised of 5 tokens"),
        ("tokens,supervised,samples\n5,x,1\n", "cannot read the histogram"),
        ("tokens,supervised,samples\n5\n", "cannot read the histogram"),
    ],
)
def test_bad_histograms_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    planned = tmp_path / "cache.json"
    planned.write_text(make_spec().to_json())
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(text)
    assert main(["estimate", str(planned), "--histogram", str(lengths)]) == 1
    assert message in capsys.readouterr().err
    assert main(["estimate", str(planned)]) == 1
    assert "give --histogram" in capsys.readouterr().err
    lengths.write_text("tokens,supervised,samples\n")
    assert main(["estimate", str(planned), "--histogram", str(lengths), "--tokens", "5"]) == 1
    assert "no sample is left to price" in capsys.readouterr().err


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec()
    build(tmp_path / "cache", spec, [make_sample(spec, 0, tokens=9)])
    url = str(tmp_path / "cache")
    for option, value in (
        ("--tokens", "-5"),
        ("--tokens", "0"),
        ("--max-tokens", "0"),
        ("--sample-fraction", "7"),
        ("--sample-fraction", "-1"),
        ("--sample-fraction", "nan"),
        ("--sample-fraction", "half"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["estimate", url, option, value])
        assert f"argument {option}: found '{value}', wanted" in capsys.readouterr().err
    for value in ("0", "-1", "x", "", str(spec.num_target_layers + 1)):
        assert main(["estimate", url, f"--layers={value}"]) == 1
        assert f"--layers is '{value}', wanted whole numbers from 1 to" in capsys.readouterr().err
    assert main(["estimate", url, "--max-tokens", "1"]) == 1
    assert "no sample is left to price" in capsys.readouterr().err
