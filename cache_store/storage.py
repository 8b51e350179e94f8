"""One interface to a folder or a bucket: atomic put, conditional put, ranged reads, listing, bounded retries.

Local folders go through the operating system (`backend.py`), everything else through fsspec (`bucket.py`). Credentials
come by each store's usual means, never through this program.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from cache_store.backend import TEMPORARY, Backend, LocalBackend, ObjectInfo, Upload, read_at_once
from cache_store.errors import AlreadyExists, NotFound, ObjectEndsEarly, StorageError
from cache_store.retry import EndsEarly, GaveUp, StorageOptions, Transfer, error_code, with_retries
from cache_store.scratch import ScratchFolder

SPLIT_BYTES = 8 << 20
"""A range of more than twice this is fetched from a bucket in pieces of this size at the same time."""

_BUCKETS = ("s3", "gs")
_SCHEMES = ("file", "memory", *_BUCKETS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
FREE_SPACE = "free some space or choose another place, then run the same command again: what is committed is kept"
Result = TypeVar("Result")


class Storage:
    """A cache's root. Opens its client on first use in each process, so it travels to Ray actors and loader workers."""

    def __init__(self, url: str, endpoint_url: str | None = None, options: StorageOptions | None = None) -> None:
        self.url = url.rstrip("/") if len(url) > 1 else url
        self.endpoint_url = endpoint_url
        self.options = options or StorageOptions()
        scheme = _scheme(url)
        self.local_root: Path | None = None
        if scheme in ("", "file"):
            self.local_root = Path(self.url.removeprefix("file://")).expanduser().resolve()
        self._backend: Backend | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._scratch: ScratchFolder | None = None
        self._pid = self._scratch_pid = -1

    def __reduce__(self) -> tuple[type[Storage], tuple[str, str | None, StorageOptions]]:
        url = self.url if self.local_root is None else str(self.local_root)
        return Storage, (url, self.endpoint_url, self.options)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    @property
    def backend(self) -> Backend:
        """This process's client: clients with threads do not survive a fork."""
        if self._backend is None or self._pid != os.getpid():
            self._backend, self._pool, self._pid = self._open_backend(), None, os.getpid()
        return self._backend

    def _open_backend(self) -> Backend:
        if self.local_root is not None:
            return LocalBackend(self.local_root)
        from cache_store.bucket import FsspecBackend, S3Backend  # a local cache needs no storage client

        if self.url.startswith("s3://"):
            return S3Backend(self.url, self.endpoint_url, self.options)
        return FsspecBackend(self.url, self.options)

    def put(self, name: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        """Store an object so that readers see all of it or nothing. A Path is a file that is moved away.

        Raises AlreadyExists (if_absent, and the name is taken by another content) or StorageError.
        """
        try:
            self._retry("write", name, lambda: self.backend.put(name, data, if_absent))
        except AlreadyExists:
            # A put whose answer was lost finds itself when it, or the client below it, is repeated.
            if isinstance(data, Path) or self.read(name) != data:
                raise

    def read(self, name: str) -> bytes:
        """A whole object. Raises NotFound or StorageError."""
        return self.read_many([name])[0]

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole objects in the order of the names, fetched at the same time where the store allows it."""
        return self._retry("read", names[0], lambda: self.backend.read_many(names)) if names else []

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises NotFound, ObjectEndsEarly, StorageError."""
        if length <= 2 * SPLIT_BYTES or self.local_root is not None:
            return self._read_piece(name, offset, length) if length else b""
        if self._pool is None or self._pid != os.getpid():
            _ = self.backend  # threads do not survive a fork either
            self._pool = ThreadPoolExecutor(max_workers=self.options.connections)
        starts = range(offset, offset + length, SPLIT_BYTES)
        pieces = [
            self._pool.submit(self._read_piece, name, start, min(SPLIT_BYTES, offset + length - start))
            for start in starts
        ]
        try:
            return b"".join(piece.result() for piece in pieces)
        finally:
            for piece in pieces:
                piece.cancel()

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on, in one request. Raises NotFound, ObjectEndsEarly, StorageError."""
        if self.local_root is None or not read_at_once(f"{self.local_root}/{name}", offset, out):
            self._read_piece(name, offset, len(out), out)

    def _read_piece(self, name: str, offset: int, length: int, into: memoryview | None = None) -> bytes:
        transfer = Transfer(length, self.options, into)  # keeps what has arrived from one attempt to the next
        try:
            self._retry("read", name, lambda: self.backend.read(name, offset, transfer))
        except StorageError as error:
            if isinstance(error.__cause__, GaveUp) and isinstance(error.__cause__.reason, EndsEarly):
                found = f"{self.path(name)}: found {transfer.done} bytes at {offset}, wanted {length}"
                raise ObjectEndsEarly(found) from error
            raise
        return transfer.content()

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

    def move(self, name: str, new_name: str) -> None:
        """Give an object another name, whatever was there. Raises NotFound. In a bucket it is a copy on the server."""
        self._retry("move", name, lambda: self.backend.move(name, new_name))

    def unfinished_uploads(self, prefix: str) -> Sequence[Upload]:
        """Uploads in parts below the prefix that were neither completed nor aborted: they cost space, unseen."""
        return self._retry("list uploads of", prefix, lambda: self.backend.unfinished_uploads(prefix))

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an unfinished upload."""
        self._retry("abort the upload of", upload.name, lambda: self.backend.abort_upload(upload))

    def free_bytes(self) -> int | None:
        """Bytes free for this user on the folder's file system; None for a bucket."""
        if self.local_root is None:
            return None
        existing = next(path for path in (self.local_root, *self.local_root.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def scratch_dir(self) -> Path:
        """Where an unfinished shard is best written: beside its final place, or in the machine's temporary folder."""
        if self.local_root is None:
            if self._scratch is None or self._scratch_pid != os.getpid():
                self._scratch, self._scratch_pid = ScratchFolder(), os.getpid()
            return self._scratch.path
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

    def _retry(self, verb: str, name: str, call: Callable[[], Result], attempts: int | None = None) -> Result:
        try:
            return with_retries(call, self.options, attempts)
        except GaveUp as gave_up:
            raise self._translate(verb, name, gave_up) from gave_up

    def _translate(self, verb: str, name: str, gave_up: GaveUp) -> StorageError:
        """The client's error as ours, in one line."""
        error = gave_up.reason
        where, code, kind = self.path(name), error_code(error), type(error).__name__
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
        elif kind == "EndpointConnectionError" or isinstance(error, ConnectionRefusedError):
            message = f"{self.url}: cannot reach the endpoint {self.endpoint_url or 'of AWS'}; is it running?"
        else:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            message = f"{where}: cannot {verb} after {gave_up.attempts} attempts: {kind}: {error}{notes}"
        return StorageError(message)


def _scheme(url: str) -> str:
    """`s3` of s3://bucket/prefix, nothing for a folder. Raises StorageError for what a slip of the pen has made."""
    scheme, found, rest = url.partition("://")
    if not found:
        if url.partition(":")[0] in _SCHEMES:  # s3:/bucket would be a folder named `s3:`
            raise StorageError(f"{url}: found no '://', wanted a folder or s3://bucket/prefix")
        scheme, rest = "", url
    if scheme not in ("", *_SCHEMES):
        raise StorageError(f"{url}: unknown kind of storage {scheme!r}; wanted a folder or s3://bucket/prefix")
    if not rest.strip() or (scheme in _BUCKETS and not urlsplit(url).netloc):
        raise StorageError(f"{url!r} names no place; wanted a folder or s3://bucket/prefix")
    return scheme


def open_storage(url: str, *, endpoint_url: str | None = None, options: StorageOptions | None = None) -> Storage:
    """A folder path, file:// URL, s3://bucket/prefix (or memory://name for tests); nothing is touched yet."""
    return Storage(url, endpoint_url, options)
