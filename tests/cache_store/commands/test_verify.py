from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cache_store.audit import AuditProgress
from cache_store.cli import main
from cache_store.commands import progress
from cache_store.ledger import Ledger
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec


def test_the_bar_shows_done_total_rate_and_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=160)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with progress.audit_bar("verifying") as advance:
        advance(AuditProgress(3, 7, 30_000_000, 70_000_000, 1))
    shown = screen.getvalue()
    for wanted in ("verifying", "3/7 shards", "30.0/70.0 MB", "1 damaged"):
        assert wanted in shown


def test_no_bar_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 2)
    assert main(["verify", storage.url]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    assert found.out.startswith("sound: 1 shards, 2 samples")


def test_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    build_cache(storage, make_spec(), 2)
    storage.put("shards/part-dead.parquet", b"left over")
    assert main(["verify", storage.url]) == 3
    assert f"cache_store gc {storage.url} --delete" in capsys.readouterr().out
    record = Ledger(storage).records()[0]
    content = bytearray(storage.read(record.name))
    content[record.samples[1].offset + record.samples[1].length - 2] ^= 1
    storage.put(record.name, bytes(content))
    assert main(["verify", storage.url]) == 1
    assert f"cache_store repair {storage.url}" in capsys.readouterr().out
    assert main(["verify", storage.url, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert record.samples[1].sample_id in {finding["sample_id"] for finding in findings}
