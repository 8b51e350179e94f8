from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_store.cli import main
from cache_store.storage import Storage, open_storage
from tests.cache_store.samples import build_cache, make_spec


@pytest.fixture
def caches(tmp_path: Path) -> tuple[Storage, Storage]:
    a, b = (open_storage(str(tmp_path / name)) for name in "ab")
    build_cache(a, make_spec(), 4)
    build_cache(b, make_spec(identity={**make_spec().identity, "seed": 2}), 3)
    return a, b


def test_same(caches: tuple[Storage, Storage], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", caches[0].url, caches[0].url]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "content was compared by the recorded checksums; --values reads the samples themselves",
        "the content of all 4 samples in both is the same",
        "same: 4 samples in both",
    ]
    assert main(["diff", caches[0].url, caches[0].url, "--values", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_different(caches: tuple[Storage, Storage], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = caches
    assert main(["diff", a.url, b.url]) == 1
    shown = capsys.readouterr().out
    for wanted in ("identity.seed", "s0003", "DIFFERENT: 3 samples in both"):
        assert wanted in shown
    assert main(["diff", a.url, b.url, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["only_a"] == ["s0003"]
    assert facts["settings"] == [["identity.seed", 1, 2]]


def test_other_containers(caches: tuple[Storage, Storage], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tar = open_storage(str(tmp_path / "tar"))
    build_cache(tar, make_spec(format="tar"), 4)
    assert main(["diff", caches[0].url, tar.url]) == 1
    assert "compare with --values" in capsys.readouterr().out
    assert main(["diff", caches[0].url, tar.url, "--values"]) == 1
    assert "the content of all 4 samples in both is the same\nDIFFERENT" in capsys.readouterr().out


def test_missing_cache(caches: tuple[Storage, Storage], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", caches[0].url, str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("NotFound: ")
