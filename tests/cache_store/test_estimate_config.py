from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_store.errors import CacheError
from cache_store.estimate import TokenCounts
from cache_store.estimate_config import read_planned
from tests.cache_store.samples import make_spec

TARGET = {"hidden_size": 64, "num_hidden_layers": 12, "vocab_size": 1000}
CONFIG: dict[str, Any] = {
    "max_length": 300,
    "target": {"path": "TARGET"},
    "extraction": {"layer_ids": [1, 5], "num_actors": 3},
    "cache": {"url": "s3://b/c", "shard_mb": 32, "codec": "i8cr"},
    "plan": {"samples": 100, "prompt_tokens": 50, "response_tokens": 150},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    return tmp_path


def write(folder: Path, name: str = "job.yaml", **changes: Any) -> Path:
    data = {**CONFIG, "target": {"path": str(folder)}, **changes}
    path = folder / name
    path.write_text(json.dumps(data) if path.suffix == ".json" else yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("name", ["job.yaml", "job.json"])
def test_a_job_s_config_is_enough(folder: Path, name: str) -> None:
    planned = read_planned(write(folder, name))
    spec = planned.spec
    assert (spec.layer_ids, spec.hidden_size, spec.num_target_layers, spec.vocab_size) == ((1, 5), 64, 12, 1000)
    assert (spec.codec, spec.last_codec, spec.last_hidden, spec.shard_bytes) == ("i8cr", "bss1", "needed", 32 << 20)
    assert planned.counts == TokenCounts(samples=100, tokens=20_000, supervised=15_000)


def test_long_samples_are_cut_at_max_length(folder: Path) -> None:
    planned = read_planned(write(folder, max_length=120))
    assert planned.counts == TokenCounts(samples=100, tokens=12_000, supervised=12_000)
    assert read_planned(write(folder, plan={"samples": 5})).counts is None


def test_a_cache_s_own_settings_serve_as_well(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_text(make_spec(format="tar").to_json())
    planned = read_planned(path)
    assert planned.spec == make_spec(format="tar")
    assert planned.counts is None


def test_the_target_s_sizes_may_come_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"text_config": {**TARGET, "hidden_size": 32}}))
    path = write(folder, target={"path": "org/name"})
    assert read_planned(path, other).spec.hidden_size == 32
    named = write(folder, "named.yaml", target={"path": "org/name"}, plan={"target_config": str(other)})
    assert read_planned(named).spec.hidden_size == 32
    with pytest.raises(CacheError, match=r"not on this machine \(org/name/config\.json\); give --target-config"):
        read_planned(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extraction": {}}, r"key extraction\.layer_ids is missing"),
        ({"cache": 3}, "cache is 3, wanted a section"),
        ({"cache": {"codec": "zip"}}, "codec is 'zip'"),
    ],
)
def test_what_is_missing_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        read_planned(write(folder, **changes))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "- 1", "found list, wanted a mapping"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CacheError, match=message):
        read_planned(tmp_path / name)
    with pytest.raises(CacheError, match="cannot read the config"):
        read_planned(tmp_path / "nothing.yaml")
    (tmp_path / name).write_bytes(b"a: \xff")
    with pytest.raises(CacheError, match="not UTF-8"):
        read_planned(tmp_path / name)


def test_a_target_config_that_is_given_must_be_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"absent\.json: cannot read"):
        read_planned(write(folder), tmp_path / "absent.json")
