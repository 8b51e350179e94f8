"""Where shards on their way to a bucket are written: a folder per process, swept by the next one once it is dead.

A killed writer cannot remove its unfinished shard, which may be half a gigabyte of the machine's temporary folder. A
lock that the system releases with the process tells the living from the dead, across containers too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path

_LOCK = "alive"


class ScratchFolder:
    """A new folder below the machine's temporary folder, there as long as this object or until the process dies."""

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir()) / f"target-cache-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        _sweep(root)
        while True:
            self.path = root / uuid.uuid4().hex
            self.path.mkdir()
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / _LOCK).exists():
                break
            os.close(self._lock)  # somebody swept it before it was locked
        weakref.finalize(self, _remove, self.path, self._lock, os.getpid())


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which shares the lock
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep(root: Path) -> None:
    """Remove the folders of dead processes. A folder without a lock file is being made this moment: it stays."""
    for folder in root.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                continue
            finally:
                os.close(lock)
