from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.atomic_file import write_atomically


def test_content_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text in ("old", "neu ü"):
        write_atomically(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_stops_half_way_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_atomically(file, "old")

    def stopped(*paths: Path) -> None:
        raise OSError("stopped")

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(OSError, match="stopped"):
        write_atomically(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
