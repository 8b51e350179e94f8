"""The import of the reference's version 2, on the cache that the reference itself wrote (tests/golden/README.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cache_store import cli
from cache_store.audit import verify_cache
from cache_store.convert import Changes, convert
from cache_store.errors import CacheError, ShardCorrupt
from cache_store.reader import CacheReader
from cache_store.reference_cache import ReferenceCache, is_reference_cache
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec
from tests.golden_data import GOLDEN

CACHE, TARGET = GOLDEN / "data" / "target_cache", GOLDEN / "target_tiny_config"
EXPECTED = load_file(GOLDEN / "data" / "target_cache_expected.safetensors")
COUNT = 5


def expected(number: int, name: str) -> torch.Tensor:
    return EXPECTED[f"sample{number}.{name}"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CACHE, tmp_path / "reference"))


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_every_tensor_is_what_the_reference_returns(tmp_path: Path, form: str) -> None:
    target = open_storage(str(tmp_path / "cache"))
    source = ReferenceCache(open_storage(str(CACHE)), TARGET)
    manifest = convert(source, target, Changes(format=form, codec="bss1", last_codec="bss1"))
    reader = CacheReader(target)
    assert (manifest.num_samples, manifest.rejected) == (COUNT, 0)
    assert reader.ids == [f"{number:010d}" for number in range(COUNT)]
    assert reader.spec.layer_ids == (1, 3, 5)
    for number in range(COUNT):
        sample = reader.read(number)
        tokens = len(sample.input_ids)
        assert sample.input_ids.tolist() == expected(number, "input_ids").tolist()
        assert sample.loss_mask.tolist() == expected(number, "loss_mask").bool().tolist()
        states = expected(number, "target_hidden_states").view(torch.uint16).numpy().reshape(tokens, 3, 64)
        assert np.array_equal(sample.hidden_states.transpose(1, 0, 2), states)
        last = expected(number, "target_last_hidden_states").view(torch.uint16).numpy()
        assert np.array_equal(sample.last_hidden_state, last.reshape(tokens, 64))
    assert verify_cache(target).findings == ()


def test_what_is_known_of_the_target_enters_the_identity() -> None:
    identity = ReferenceCache(open_storage(str(CACHE)), TARGET).spec.identity
    assert identity["imported_from"] == "reference target cache, version 2"
    assert (identity["target"], identity["template_name"], identity["max_length"]) == ("tiny", "qwen", 48)
    assert identity["weights"] is None, "a folder with the config alone"


def edit_manifest(folder: Path, **changes: Any) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: edit_manifest(folder, version=1), "version 1 of the reference's cache"),
    (lambda folder: edit_manifest(folder, hidden_dtype="float16"), "hidden_dtype is 'float16'"),
    (lambda folder: edit_manifest(folder, num_samples=6), "wanted 6 samples of 56 bytes"),
    (lambda folder: edit_manifest(folder, hidden_size=32), "hidden_size 64, the cache has 32"),
    (lambda folder: edit_manifest(folder, shards=[]), "names a shard that manifest"),
    (lambda folder: edit_manifest(folder, target_layer_ids=[1, 7]), "the last one is not a captured layer"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "not valid JSON"),
    (lambda folder: (folder / "manifest.json").write_text('{"version": 2}'), "hidden_dtype is None"),
]


@pytest.mark.parametrize("case", range(len(DAMAGE)))
def test_what_is_not_version_2_is_refused(copy: Path, case: int) -> None:
    damage, message = DAMAGE[case]
    damage(copy)
    with pytest.raises(CacheError, match=message):
        ReferenceCache(open_storage(str(copy)), TARGET)


def test_a_cut_shard_and_a_mask_that_is_none_are_named(copy: Path) -> None:
    shard = copy / "shard-00002.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    source = ReferenceCache(open_storage(str(copy)), TARGET)
    with pytest.raises(ShardCorrupt, match=r"shard-00002\.bin: sample 0000000004: last_hidden_state"):
        source.sample(4)
    source.sample(3)
    shard.write_bytes(content[:35] + b"\x07" + content[36:])
    with pytest.raises(ShardCorrupt, match="0000000003: its loss mask"):
        source.sample(3)


def test_a_sample_that_no_cache_may_hold_is_rejected_by_name(copy: Path, tmp_path: Path) -> None:
    shard = copy / "shard-00002.bin"
    content = bytearray(shard.read_bytes())
    content[35:42] = bytes(7)  # sample 3: nothing is supervised
    shard.write_bytes(content)
    target = open_storage(str(tmp_path / "cache"))
    manifest = convert(ReferenceCache(open_storage(str(copy)), TARGET), target, Changes())
    assert manifest.rejects == {"convert": {"none of its 7 tokens is supervised": 1}}
    assert "0000000003" not in CacheReader(target).ids


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "cache")
    assert cli.main(["convert", str(CACHE), target]) == 1
    assert "--target" in capsys.readouterr().err
    arguments = ["convert", str(CACHE), target, "--target", str(TARGET), "--codec", "bss1", "--last-hidden", "needed"]
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == COUNT
    assert cli.main(["verify", target]) == 0
    assert cli.main(["convert", str(CACHE), target, "--target", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


def test_our_own_caches_are_not_taken_for_it(tmp_path: Path) -> None:
    storage: Storage = open_storage(str(tmp_path))
    build_cache(storage, make_spec(), 1)
    assert not is_reference_cache(storage)
    assert is_reference_cache(open_storage(str(CACHE)))
