from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.ledger import Ledger
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import make_spec
from tests.cache_store.survival import same_build

SPEC = make_spec(shard_bytes=6000)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    same_build(storage, SPEC, 6)
    return storage


def damage(storage: Storage) -> str:
    record = Ledger(storage).records()[0]
    content = bytearray(storage.read(record.name))
    content[record.samples[0].offset + record.samples[0].length - 2] ^= 1
    storage.put(record.name, bytes(content))
    return record.samples[0].sample_id


def test_exit_codes_and_what_people_read(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", storage.url]) == 0
    assert capsys.readouterr().out == "whole\n"
    damage(storage)
    assert main(["repair", storage.url, "--dry-run"]) == 4
    assert "dry run: nothing was changed" in capsys.readouterr().out
    assert storage.list("aside/") == []
    assert main(["repair", storage.url]) == 4
    shown = capsys.readouterr().out
    assert "set-aside" in shown
    assert "run the same build again: it makes only those" in shown
    same_build(storage, SPEC, 6)
    storage.put("manifest.json", b"{}")
    assert main(["repair", storage.url]) == 0
    assert "whole again" in capsys.readouterr().out


def test_json(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    damage(storage)
    assert main(["repair", storage.url, "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["whole"] is False
    assert report["needs_build"] is True
    assert report["lost"]
    assert {step["kind"] for step in report["steps"]} == {"set-aside"}


def test_exclude_names_the_list_for_the_config(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", storage.url, "--exclude"]) == 0
    assert "nothing is damaged" in capsys.readouterr().out
    sample_id = damage(storage)
    assert main(["repair", storage.url, "--exclude"]) == 0
    shown = capsys.readouterr().out
    (name,) = (info.name for info in storage.list("exclusions/"))
    assert f"cache.exclusions={name}" in shown
    assert main(["repair", storage.url, "--exclude", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["exclusions"] == name
    assert [item["sample_id"] for item in facts["samples"]] == [sample_id]
    sound = next(name for name in CacheReader(storage).ids if name != sample_id)
    assert main(["repair", storage.url, "--exclude", "--sample", sound, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["samples"]
    assert {item["sample_id"] for item in listed} == {sample_id, sound}
    assert main(["repair", storage.url, "--sample", sound]) == 1
    assert "--sample goes with --exclude" in capsys.readouterr().err
    assert main(["repair", storage.url, "--exclude", "--dry-run"]) == 1
