"""Small files that a reader sees whole: the old content or the new."""

from __future__ import annotations

import os
from pathlib import Path

from cache_store.backend import sync

TEMPORARY = ".tmp"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old content or the new, never a part, whenever the machine stops."""
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
