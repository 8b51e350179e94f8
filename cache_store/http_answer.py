"""One HTTP answer on a socket: its head by httptools' parser, its body straight into the caller's memory.

Why not the standard library's client: it reads headers with the mail parser, which takes a fifth of the processor time
of a whole sample's read (`benchmarks/cache.py --only s3`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httptools

_HEAD_BYTES = 1 << 16
"""What one call takes from the socket while the head, or a body of unknown length, is read."""


class BadAnswer(ConnectionError):
    """What came is no HTTP answer, or ended within its head or body."""


class Answer:
    """Status, headers and body of the answer to one request. Raises BadAnswer when the head is none.

    `on_...` are what httptools calls.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.headers: dict[bytes, bytes] = {}
        """By lower-case name."""
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = self.complete = False
        self.keeps_alive = False
        """Whether the connection may serve another request once the body has been read."""
        while not self._has_head:
            self._feed()
        self.status: int = self._parser.get_status_code()
        length = self.headers.get(b"content-length")
        chunked = b"transfer-encoding" in self.headers
        self.length = int(length) if length is not None and not chunked else None
        """Bytes of the body; None where the head does not say so."""

    def first(self) -> bytes:
        """The part of the body that came with the head; the rest of `length` stands in the socket."""
        content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        return content

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes, up to its end. Raises BadAnswer when the connection ends before."""
        yield self.first()
        while not self.complete and self._feed(ends=self.length is None):
            yield self.first()

    def on_message_begin(self) -> None:
        """The start of an answer; there is but one, interim ones apart."""
        if self.complete:
            raise BadAnswer("bytes came after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The end of a head; the one of an interim answer (1xx) does not count."""
        self._has_head = self._parser.get_status_code() >= 200
        self.keeps_alive = self._parser.should_keep_alive()  # known here alone
        if not self._has_head:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The end of the body."""
        self.complete = self._has_head

    def _feed(self, *, ends: bool = False) -> bool:
        """Parse what the socket has; False at the end of a body that the end of the connection ends (`ends`)."""
        data = self._connection.recv(_HEAD_BYTES)
        if not data:
            if ends and b"transfer-encoding" not in self.headers:
                self.complete = True
                return False
            raise BadAnswer("the connection ended within the answer" if self.headers else "the connection was closed")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadAnswer(f"no valid answer: {error}") from error
        return True
