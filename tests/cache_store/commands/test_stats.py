from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 8)
    return storage


def test_terminal_and_picture(storage: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "stats.picture"  # a picture whatever its name
    assert main(["stats", storage.url, "--samples", "3", "--png", str(picture)]) == 0
    shown = capsys.readouterr().out
    for wanted in ("Supervised tokens per sample", "█", "States of 3 samples", "norm", "massive", "Domains: math 8"):
        assert wanted in shown
    assert picture.stat().st_size > 1000


def test_json(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", storage.url, "--samples", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["samples"], facts["layers"], facts["read_samples"]) == (8, [], 0)
