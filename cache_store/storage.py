"""One interface to a folder or a bucket: atomic put, conditional put, ranged reads, listing, bounded retries.

Local folders go through the operating system (temporary file, fsync, rename or link); everything else through fsspec
(s3:// through s3fs). Credentials come by each store's usual means, never through this program.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import fsspec

from cache_store.errors import AlreadyExists, NotFound, StorageError

ATTEMPTS = 5
FIRST_DELAY_S = 0.2
SPLIT_BYTES = 8 << 20
"""A range of more than twice this is fetched from a bucket in pieces of this size at the same time."""
TEMPORARY = "tmp"
"""Folder of unfinished local files, inside the cache so that a rename publishes them."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRANSIENT = (errno.EBUSY, errno.EREMOTEIO, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET)
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
FREE_SPACE = "free some space or choose another place, then run the same command again: what is committed is kept"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object: its name below the cache's root, and its size in bytes."""

    name: str
    size: int


class Backend(Protocol):
    """What a kind of storage must do; errors are the operating system's or the client's own."""

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None: ...
    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]: ...
    def read_many(self, names: Sequence[str]) -> list[bytes]: ...
    def size(self, name: str) -> int: ...
    def list(self, prefix: str) -> list[ObjectInfo]: ...
    def delete(self, name: str) -> None: ...
    def check_place(self) -> None: ...


class LocalBackend:
    """A folder of this machine or of a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None:
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
                os.link(temporary, target)  # fails when the name exists: the first of two writers wins
            else:
                os.replace(temporary, target)
        finally:
            if isinstance(data, Path) and temporary.exists() and not (target.exists() and target.samefile(temporary)):
                os.replace(temporary, data)  # not published: the caller may try again
            temporary.unlink(missing_ok=True)
        _fsync_folder(target.parent)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with (self.root / name).open("rb", buffering=0) as file:
            return [_read_fully(file.fileno(), offset, length) for offset, length in ranges]

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        return [(self.root / name).read_bytes() for name in names]

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = self.root / prefix
        paths = folder.parent.glob(folder.name + "*") if not prefix.endswith("/") and prefix else [folder]
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
        return [ObjectInfo(f.relative_to(self.root).as_posix(), f.stat().st_size) for f in files if f.is_file()]

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    def check_place(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)


class FsspecBackend:
    """A bucket (s3://…) or another store that fsspec reaches."""

    def __init__(self, url: str, endpoint_url: str | None) -> None:
        options: dict[str, Any] = {"use_listings_cache": False}
        if url.startswith("s3://"):
            # The retries are ours and s3fs's: botocore's own would multiply them.
            options["config_kwargs"] = {"retries": {"max_attempts": 1, "mode": "standard"}, "connect_timeout": 10}
            if endpoint_url is not None:
                options["endpoint_url"] = endpoint_url
        self.fs, self.root = fsspec.core.url_to_fs(url, **options)
        self.is_s3 = url.startswith("s3://")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None:
        mode = "create" if if_absent else "overwrite"
        if isinstance(data, Path) and self.is_s3:
            self.fs.put_file(str(data), self._path(name), mode=mode)
        else:
            content = data.read_bytes() if isinstance(data, Path) else data
            self.fs.pipe_file(self._path(name), content, mode=mode)
        if isinstance(data, Path):
            data.unlink()

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        path = self._path(name)
        if len(ranges) == 1:
            offset, length = ranges[0]
            return [self.fs.cat_file(path, start=offset, end=offset + length)]
        starts = [offset for offset, _ in ranges]
        ends = [offset + length for offset, length in ranges]
        return self.fs.cat_ranges([path] * len(ranges), starts, ends, on_error="raise")

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        if len(names) == 1:
            return [self.fs.cat_file(self._path(names[0]))]
        found = self.fs.cat([self._path(name) for name in names])
        return [found[self._path(name)] for name in names]

    def size(self, name: str) -> int:
        return int(self.fs.info(self._path(name))["size"])

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder, _, start = prefix.rpartition("/")
        found = self.fs.find(self._path(folder) if folder else self.root, detail=True)
        names = {path[len(self.root) + 1 :]: info["size"] for path, info in found.items() if info["type"] == "file"}
        return [ObjectInfo(name, size) for name, size in names.items() if name.startswith(prefix) or not start]

    def delete(self, name: str) -> None:
        self.fs.rm_file(self._path(name))

    def check_place(self) -> None:
        if self.is_s3:  # some servers create a bucket on the first put, which would hide a typing mistake
            self.fs.call_s3("head_bucket", Bucket=self.root.partition("/")[0])


class Storage:
    """A cache's root. Opens its client on first use in each process, so it travels to Ray actors and loader workers."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        self.url = url.rstrip("/") if len(url) > 1 else url
        self.endpoint_url = endpoint_url
        scheme = urlsplit(self.url).scheme if "://" in self.url else ""
        if scheme not in ("", "file", "s3", "gs", "memory"):
            raise StorageError(f"{url}: unknown kind of storage {scheme!r}; wanted a folder or s3://bucket/prefix")
        self.local_root: Path | None = None
        if scheme in ("", "file"):
            self.local_root = Path(self.url.removeprefix("file://")).expanduser().resolve()
        self._backend: Backend | None = None
        self._pid = -1

    def __reduce__(self) -> tuple[type[Storage], tuple[str, str | None]]:
        return Storage, (self.url if self.local_root is None else str(self.local_root), self.endpoint_url)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    @property
    def backend(self) -> Backend:
        """This process's client: clients with threads do not survive a fork."""
        if self._backend is None or self._pid != os.getpid():
            if self.local_root is not None:
                self._backend = LocalBackend(self.local_root)
            else:
                self._backend = FsspecBackend(self.url, self.endpoint_url)
            self._pid = os.getpid()
        return self._backend

    def put(self, name: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        """Store an object so that readers see all of it or nothing. A Path is a file that is moved away.

        Raises AlreadyExists (if_absent and the name is taken) or StorageError.
        """
        self._retry("write", name, lambda: self.backend.put(name, data, if_absent))

    def read(self, name: str) -> bytes:
        """A whole object. Raises NotFound or StorageError."""
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole objects in the order of the names, fetched at the same time where the store allows it."""
        return self._retry("read", names[0], lambda: self.backend.read_many(names)) if names else []

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises NotFound, or StorageError when the object ends before."""
        step = SPLIT_BYTES if length > 2 * SPLIT_BYTES else length
        pieces = [(start, min(step, offset + length - start)) for start in range(offset, offset + length, step or 1)]
        if not pieces:
            return b""
        parts = self._retry("read", name, lambda: self.backend.read_ranges(name, pieces))
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(data) != length:
            raise StorageError(f"{self.path(name)}: found {len(data)} bytes at {offset}, wanted {length}")
        return data

    def size(self, name: str) -> int:
        """Bytes of an object. Raises NotFound."""
        return self._retry("look up", name, lambda: self.backend.size(name))

    def exists(self, name: str) -> bool:
        """Whether an object of that name is there."""
        try:
            self.size(name)
        except NotFound:
            return False
        return True

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Objects whose names start with the prefix, sorted by name; none when the folder does not exist."""
        try:
            found = self._retry("list", prefix, lambda: self.backend.list(prefix))
        except NotFound:
            return []
        return sorted(found, key=lambda info: info.name)

    def delete(self, name: str) -> None:
        """Remove an object. Raises NotFound."""
        self._retry("delete", name, lambda: self.backend.delete(name))

    def free_bytes(self) -> int | None:
        """Bytes free for this user on the folder's file system; None for a bucket."""
        if self.local_root is None:
            return None
        existing = next(path for path in (self.local_root, *self.local_root.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def scratch_dir(self) -> Path:
        """Where an unfinished shard is best written: beside its final place, or the machine's temporary folder."""
        if self.local_root is None:
            return Path(tempfile.gettempdir())
        folder = self.local_root / TEMPORARY
        self._retry("create", TEMPORARY, lambda: folder.mkdir(parents=True, exist_ok=True))
        return folder

    def check_writable(self) -> None:
        """Write and delete a small probe. Raises StorageError, one line, when the place cannot take a cache."""
        probe = f"{TEMPORARY}/probe-{uuid.uuid4().hex}"
        self._retry("open", "", self.backend.check_place, attempts=1)
        self._retry("write", probe, lambda: self.backend.put(probe, b"probe", False), attempts=1)
        self._retry("delete", probe, lambda: self.backend.delete(probe), attempts=1)

    def path(self, name: str) -> str:
        """Full name of an object, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def _retry(self, verb: str, name: str, call: Callable[[], Result], attempts: int = ATTEMPTS) -> Result:
        for attempt in range(1, attempts + 1):
            try:
                return call()
            except Exception as error:
                if attempt == attempts or not _is_transient(error):
                    raise self._translate(verb, name, error, attempt) from error
                time.sleep(FIRST_DELAY_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")

    def _translate(self, verb: str, name: str, error: Exception, attempts: int) -> StorageError:
        """The client's error as ours, in one line."""
        where, code, kind = self.path(name), _error_code(error), type(error).__name__
        if isinstance(error, StorageError):
            return error
        if (isinstance(error, FileExistsError) and verb != "open") or code in _TAKEN:
            return AlreadyExists(f"{where} exists already")
        if isinstance(error, FileNotFoundError) and code != "NoSuchBucket" and verb != "open":
            return NotFound(f"{where} does not exist")
        if isinstance(error, FileNotFoundError):
            bucket = urlsplit(self.url).netloc
            message = f"{self.url}: bucket {bucket!r} does not exist; create it or correct the URL"
        elif kind in _NO_CREDENTIALS:
            message = f"{self.url}: no credentials found ({error}); set them as for any S3 client"
        elif isinstance(error, PermissionError):
            message = f"{where}: not allowed to {verb} ({code or error}); check credentials and permissions"
        elif isinstance(error, NotADirectoryError | FileExistsError):
            message = f"{where}: a file stands where a folder is wanted; choose another place"
        elif isinstance(error, OSError) and error.errno in _FULL:
            free = self.free_bytes()
            known = "" if free is None else f" ({free:,} bytes free)"
            message = f"{where}: no space left{known}; {FREE_SPACE}"
        elif kind == "EndpointConnectionError":
            message = f"{self.url}: cannot reach the endpoint {self.endpoint_url or 'of AWS'}; is it running?"
        else:
            message = f"{where}: cannot {verb} after {attempts} attempts: {kind}: {error}"
        return StorageError(message)


def open_storage(url: str, *, endpoint_url: str | None = None) -> Storage:
    """A folder path, file:// URL, s3://bucket/prefix (or memory://name for tests); nothing is touched yet."""
    return Storage(url, endpoint_url)


def _error_code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _is_transient(error: Exception) -> bool:
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError | StorageError):
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"HTTPClientError", "ClientPayloadError", "IncompleteRead", "FSTimeoutError"})


def _read_fully(descriptor: int, offset: int, length: int) -> bytes:
    pieces, done = [], 0
    while done < length and (piece := os.pread(descriptor, length - done, offset + done)):
        pieces.append(piece)
        done += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
