"""One process at a time compiles DeepSpeed's CPU op, and one that was killed while compiling stops nobody.

torch marks a running build with a file named `lock` and waits for it to vanish, for ever when its maker was killed. A
lock of the operating system ends with its holder, so whoever holds it knows that such a file is left over.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

FOLDER = "dspark_trainer"
VARIABLE = "TORCH_EXTENSIONS_DIR"


def own_build_folder() -> Path:
    """Point torch's extension builds of this process at a folder that no other program builds in; returns it."""
    chosen = Path(os.environ.get(VARIABLE) or get_default_build_root())
    folder = chosen if chosen.name == FOLDER else chosen / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(folder)  # the only way that torch takes it
    return folder


@contextmanager
def exclusive_build(folder: Path) -> Iterator[None]:
    """Hold the folder for one build; what killed builds left as marks is removed first."""
    with (folder / "building.flock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for mark in folder.glob("**/lock"):
            mark.unlink(missing_ok=True)
        yield
