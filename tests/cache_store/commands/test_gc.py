from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.commands.gc import seconds
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 2)
    return storage


def test_dry_run_then_delete(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", storage.url]) == 0
    storage.put("shards/part-dead.parquet", b"left over")
    assert main(["gc", storage.url]) == 0
    assert "kept: young" in capsys.readouterr().out
    assert storage.local_root is not None
    os.utime(storage.local_root / "shards" / "part-dead.parquet", (0, 0))
    assert main(["gc", storage.url]) == 3
    shown = capsys.readouterr().out
    assert "would go" in shown
    assert f"cache_store gc {storage.url} --delete" in shown
    assert main(["gc", storage.url, "--older-than", "30m", "--aside"]) == 3
    assert f"cache_store gc {storage.url} --older-than 1800 --aside --delete" in capsys.readouterr().out
    assert main(["gc", storage.url, "--delete", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["deleted"], report["freed_bytes"], report["left"]) == (1, 9, 0)
    assert not storage.exists("shards/part-dead.parquet")


def test_age_can_be_chosen(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    storage.put("tmp/part-dead.parquet", b"left over")
    assert main(["gc", storage.url, "--older-than", "0s", "--delete"]) == 0
    assert "deleted 1 objects" in capsys.readouterr().out
    assert storage.list("tmp/") == []


@pytest.mark.parametrize(("text", "wanted"), [("90", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172800)])
def test_ages(text: str, wanted: float) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "soon", "3w", "-1h"])
def test_wrong_ages(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not an age; wanted 30m"):
        seconds(text)
