"""When a storage operation is tried again, how long it waits before, and when a transfer is too slow to wait for."""

from __future__ import annotations

import errno
import io
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from cache_store.errors import StorageError

_TRANSIENT = (errno.EBUSY, errno.EREMOTEIO, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE)
_TRANSIENT_NAMES = {
    *("HTTPClientError", "ClientPayloadError", "IncompleteRead", "FSTimeoutError", "ResponseParserError"),
    *("SSLEOFError", "SSLZeroReturnError"),
}
_DAMAGED_UPLOAD = ("BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOptions:
    """How patient a program is with its bucket. The defaults outlast a minute of refused requests."""

    attempts: int = 8
    """Tries per request (or per range: what has arrived is kept) before the error is final."""
    first_delay_s: float = 0.2
    """Wait before the second try; doubles with each further one, times a random 0.5 to 1."""
    longest_delay_s: float = 20.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """A connection on which nothing arrives for this long is abandoned."""
    floor_bytes_per_s: int = 50_000
    """A transfer slower than this over `floor_window_s` is abandoned, and goes on over another connection."""
    floor_window_s: float = 15.0
    connections: int = 16
    """Requests at the same time for one call (pieces of a large range, parts of an upload, a list of objects)."""
    part_mb: int = 16
    """Size of the parts of an upload; one part per connection is in memory, four connections at most."""

    def __post_init__(self) -> None:
        wrong = [f"{f.name} is {getattr(self, f.name)}" for f in fields(self) if not getattr(self, f.name) > 0]
        if wrong or self.part_mb < 5:
            raise ValueError(f"{', '.join(wrong) or 'part_mb is below 5, the least that S3 takes'}; wanted more")

    @property
    def part_bytes(self) -> int:
        """Size of the parts of an upload."""
        return self.part_mb << 20

    def deadline_s(self, num_bytes: int) -> float:
        """Longest time that one request which moves so many bytes may take."""
        return self.connect_timeout_s + self.read_timeout_s + num_bytes / self.floor_bytes_per_s


class GaveUp(Exception):
    """The last attempt failed, or an attempt failed for good; the reason is the cause."""

    def __init__(self, attempts: int, reason: Exception) -> None:
        super().__init__(attempts, reason)
        self.attempts, self.reason = attempts, reason


class TooSlow(TimeoutError):
    """A transfer stayed under the floor of its options."""


class ShortBody(ConnectionError):
    """A connection ended before all the bytes that it had promised."""


class EndsEarly(Exception):
    """The object itself ends before the wanted range does: no retry helps."""


class Transfer:
    """The bytes of one range as they arrive, over as many connections as it takes. length None: to the object's end.

    They land in `into`, of exactly that length, or in memory of the transfer's own.
    """

    def __init__(self, length: int | None, options: StorageOptions, into: memoryview | None = None) -> None:
        self.length, self.options, self.into = length, options, into
        self.done = 0
        self._chunks: list[bytes] = []
        self._buffer: io.BytesIO | None = None
        self._since, self._done_then = 0.0, 0

    @property
    def missing(self) -> int | None:
        """Bytes still wanted; None where the length is not known."""
        return None if self.length is None else self.length - self.done

    def restart(self) -> None:
        """Forget what has arrived: an object without a known length may be another one at the next try."""
        self._chunks, self._buffer, self.done = [], None, 0

    def start(self) -> None:
        """A connection is about to deliver: the floor is measured from now on."""
        self._since, self._done_then = time.monotonic(), self.done

    def add(self, chunk: bytes) -> None:
        """Keep a piece. Raises TooSlow when the last window brought less than the floor."""
        if self.into is not None:
            self.into[self.done : self.done + len(chunk)] = chunk
        elif self._buffer is None:
            self._chunks.append(chunk)
        else:
            self._buffer.getbuffer()[self.done : self.done + len(chunk)] = chunk
        self._count(len(chunk))

    def receive(self, connection: socket.socket, limit: int) -> None:
        """Let a socket write up to `limit` further bytes in their place; fewer when it ends. Raises TooSlow."""
        last = self.done + limit
        with self._room() as view:
            while self.done < last and (count := connection.recv_into(view[self.done : last])):
                self._count(count)

    def _room(self) -> memoryview:
        if self.into is not None:
            return self.into[:]
        if self._buffer is None:
            assert self.length is not None
            self._buffer = io.BytesIO(bytes(self.length))  # becomes the result without a copy
            self._buffer.getbuffer()[: self.done] = b"".join(self._chunks)
            self._chunks = []
        return self._buffer.getbuffer()

    def _count(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        waited = now - self._since
        if waited >= self.options.floor_window_s:
            arrived = self.done - self._done_then
            if arrived < self.options.floor_bytes_per_s * waited:
                raise TooSlow(
                    f"{arrived:,} bytes in {waited:.1f} s, floor is {self.options.floor_bytes_per_s:,} bytes/s"
                )
            self._since, self._done_then = now, self.done

    def content(self) -> bytes:
        """All bytes, in order, once nothing is missing; empty where they lie in `into`."""
        if self._buffer is not None:
            return self._buffer.getvalue()
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)


def with_retries(call: Callable[[], Result], options: StorageOptions, attempts: int | None = None) -> Result:
    """The call's result, after as many attempts as it takes and the options allow. Raises GaveUp."""
    limit = attempts or options.attempts
    for attempt in range(1, limit + 1):
        try:
            return call()
        except GaveUp:
            raise  # an inner loop has tried enough
        except Exception as error:
            if attempt == limit or not is_transient(error):
                raise GaveUp(attempt, error) from error
            longest = min(options.first_delay_s * 2 ** (attempt - 1), options.longest_delay_s)
            time.sleep(longest * random.uniform(0.5, 1.0))  # apart from the others that were refused just now
    raise AssertionError("the last attempt returns or raises")


def error_code(error: BaseException) -> str:
    """The store's own code of an error, as S3 clients keep it; empty where there is none."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later: throttling, server errors, broken or silent connections."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError | StorageError | EndsEarly):
        return False
    if isinstance(error, TimeoutError | ConnectionError) or error_code(error) in _DAMAGED_UPLOAD:
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    return bool({cls.__name__ for cls in type(error).__mro__} & _TRANSIENT_NAMES)
