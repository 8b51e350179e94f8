"""What a kind of storage must do, and the kind that is a folder of this machine or of a shared file system."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cache_store.retry import EndsEarly, Transfer

TEMPORARY = "tmp"
"""Folder of unfinished local files, inside the cache so that a rename publishes them."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: its name below the cache's root, its size in bytes, and when it was last written."""

    name: str
    size: int
    modified: float | None = None
    """Seconds since 1970 by the store's own clock; None where the store does not say."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted."""

    name: str
    key: str
    """The store's own handle."""
    started: float | None


class Backend(Protocol):
    """One process's client of a storage; errors are the operating system's or the client's own."""

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None: ...
    def read(self, name: str, offset: int, transfer: Transfer) -> None:
        """Go on with a transfer whose range begins at `offset`."""

    def read_many(self, names: Sequence[str]) -> list[bytes]: ...
    def size(self, name: str) -> int: ...
    def list(self, prefix: str) -> list[ObjectInfo]: ...
    def delete(self, name: str) -> None: ...
    def move(self, name: str, new_name: str) -> None: ...
    def check_place(self) -> None: ...
    def unfinished_uploads(self, prefix: str) -> Sequence[Upload]: ...
    def abort_upload(self, upload: Upload) -> None: ...


class LocalBackend:
    """A folder: temporary file, fsync, rename or link."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None:
        """Publish by rename, or by link when the name must be free: the first of two writers wins."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root / TEMPORARY / f"{uuid.uuid4().hex}-{target.name}"
        temporary.parent.mkdir(exist_ok=True)
        try:
            if isinstance(data, Path):
                shutil.move(data, temporary)  # a rename where both lie on one file system
                descriptor = os.open(temporary, os.O_RDWR)
            else:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(descriptor, "r+b") as file:
                if not isinstance(data, Path):
                    file.write(data)
                    file.flush()
                os.fsync(file.fileno())
            if if_absent:
                os.link(temporary, target)
            else:
                os.replace(temporary, target)
        finally:
            if isinstance(data, Path) and temporary.exists() and not (target.exists() and target.samefile(temporary)):
                os.replace(temporary, data)  # not published: the caller may try again
            temporary.unlink(missing_ok=True)
        sync(target.parent)

    def read(self, name: str, offset: int, transfer: Transfer) -> None:
        """One open, one pread where the system gives all at once."""
        if transfer.length is None:
            transfer.restart()
            transfer.add((self.root / name).read_bytes())
            return
        descriptor = os.open(f"{self.root}/{name}", os.O_RDONLY)  # joining paths would take as long as opening
        try:
            transfer.start()
            while missing := transfer.length - transfer.done:
                piece = os.pread(descriptor, missing, offset + transfer.done)
                if not piece:
                    raise EndsEarly
                transfer.add(piece)
        finally:
            os.close(descriptor)

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole files."""
        return [(self.root / name).read_bytes() for name in names]

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return (self.root / name).stat().st_size

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Files below the prefix; one that vanishes while it is looked at is not there."""
        folder = self.root / prefix
        paths = folder.parent.glob(folder.name + "*") if not prefix.endswith("/") and prefix else [folder]
        files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
        found = []
        for file in files:
            try:
                facts = file.stat()
            except FileNotFoundError:
                continue
            if file.is_file():
                found.append(ObjectInfo(file.relative_to(self.root).as_posix(), facts.st_size, facts.st_mtime))
        return found

    def delete(self, name: str) -> None:
        """Remove a file."""
        (self.root / name).unlink()

    def move(self, name: str, new_name: str) -> None:
        """One rename."""
        target = self.root / new_name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.root / name, target)
        sync(target.parent)

    def check_place(self) -> None:
        """The folder exists, or can be made."""
        self.root.mkdir(parents=True, exist_ok=True)

    def unfinished_uploads(self, prefix: str) -> Sequence[Upload]:
        """None: unfinished files are ordinary files under tmp/."""
        return []

    def abort_upload(self, upload: Upload) -> None:
        """Nothing to do."""


def read_at_once(path: str, offset: int, out: memoryview) -> bool:
    """Fill `out` from a file with a single read; False where that does not do, for whatever reason."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.preadv(descriptor, [out], offset) == len(out)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Return once a file's, or a folder's, content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
