from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from cache_store.scratch import ScratchFolder
from cache_store.storage import open_storage


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def folders(tmp_path: Path) -> set[Path]:
    return set(next(tmp_path.glob("target-cache-*")).iterdir())


def test_gone_with_its_owner(tmp_path: Path) -> None:
    folder = ScratchFolder()
    (folder.path / "part-1.parquet").write_bytes(b"half a shard")
    assert folders(tmp_path) == {folder.path}
    del folder
    assert folders(tmp_path) == set()


def test_a_killed_process_is_swept_by_the_next_and_a_living_one_is_not(tmp_path: Path) -> None:
    alive = ScratchFolder()
    ready, child = os.pipe(), os.fork()
    if child == 0:
        dead = ScratchFolder()
        (dead.path / "part-1.parquet").write_bytes(b"half a shard")
        os.write(ready[1], b"1")
        os._exit(9)  # as a kill: nothing is cleaned up
    os.read(ready[0], 1)
    os.waitpid(child, 0)
    assert len(folders(tmp_path)) == 2
    (alive.path / "part-2.parquet").write_bytes(b"mine")
    following = ScratchFolder()
    assert folders(tmp_path) == {alive.path, following.path}
    assert (alive.path / "part-2.parquet").exists()


def test_a_forked_child_leaves_its_parents_folder(tmp_path: Path) -> None:
    folder = ScratchFolder()
    child = os.fork()
    if child == 0:
        try:
            del folder
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert folders(tmp_path) == {folder.path}


def test_shards_for_a_bucket_are_written_there(tmp_path: Path) -> None:
    storage = open_storage("s3://bucket/cache")
    assert storage.scratch_dir() in folders(tmp_path)
    assert storage.scratch_dir() == storage.scratch_dir()
