"""The hot read path of a bucket: GETs of signed URLs over kept-alive connections, resumed where they broke off.

Why not the client's own reads: an asynchronous client hops between threads and buffers every body twice, which costs
more processor time than moving the bytes; and only a loop that sees each piece can keep what has arrived and notice a
connection that trickles.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import ssl
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from cache_store.errors import StorageError
from cache_store.http_answer import Answer, BadAnswer
from cache_store.retry import EndsEarly, ShortBody, StorageOptions, Transfer

SIGNED_FOR_S, SIGNED_ANEW_S = 3600, 900
"""Life of a signed URL, and the age at which it is signed anew."""
URLS_KEPT = 4096
_ERROR_BYTES = 1 << 16


class Refusal(Exception):
    """The server's own answer, in the form that S3 clients give it: the cause of the error that is raised."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.response = {"Error": {"Code": code, "Message": message}}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an object is read."""

    url: str
    proxy: SplitResult | None
    head: str
    signed: float


class RangeClient:
    """Reads objects through `sign(name) -> URL`; safe to use from several threads."""

    def __init__(self, sign: Callable[[str], str], options: StorageOptions) -> None:
        self._sign, self._options = sign, options
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._idle: list[http.client.HTTPConnection] = []  # appending and popping are atomic
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def read(self, name: str, offset: int, transfer: Transfer) -> None:
        """Go on with a transfer. Raises OSError of the kind that the refusal is, ShortBody, TooSlow, EndsEarly."""
        if transfer.length is None:  # a small object that may be replaced meanwhile, such as a manifest
            transfer.restart()
        first, wanted = offset + transfer.done, ""
        if transfer.missing is not None:
            wanted = f"Range: bytes={first}-{first + transfer.missing - 1}\r\n"
        connection, answer = self._request(name, wanted)
        kept = False
        try:
            transfer.start()
            kept = _receive(connection, answer, first, transfer) and answer.keeps_alive
        finally:
            if kept and len(self._idle) < self._options.connections:
                self._idle.append(connection)
            else:
                connection.close()

    def _request(self, name: str, wanted: str) -> tuple[http.client.HTTPConnection, Answer]:
        """A connection with a good answer on it; a kept connection that has died meanwhile is replaced at once."""
        place = self._place(name)
        while True:
            try:
                connection, used = self._idle.pop(), True
            except IndexError:
                connection, used = self._connect(place), False
            try:
                connection.sock.sendall(f"{place.head}{wanted}\r\n".encode("ascii"))
                answer = Answer(connection.sock)
            except OSError as error:
                connection.close()
                if used and isinstance(error, ConnectionError):
                    continue
                if isinstance(error, BadAnswer):
                    raise ShortBody(str(error)) from error
                raise
            if answer.status in (200, 206):
                return connection, answer
            try:
                body = _error_body(answer)
            finally:
                connection.close()
            if answer.status == 403 and time.monotonic() - place.signed > 60:  # perhaps only the signature is too old
                self._forget(name)
                raise ShortBody("the signed URL was refused after some use")
            raise _refusal(answer.status, body)

    def _place(self, name: str) -> _Place:
        now = time.monotonic()
        with self._lock:
            found = self._places.get(name)
        if found is None or now - found.signed > SIGNED_ANEW_S:
            url = self._sign(name)
            proxy = _proxy(url)
            found = _Place(url, proxy, _head(url, proxy), now)
            with self._lock:
                self._places[name] = found
                if len(self._places) > URLS_KEPT:
                    self._places.popitem(last=False)
        return found

    def _forget(self, name: str) -> None:
        with self._lock:
            self._places.pop(name, None)

    def _connect(self, where: _Place) -> http.client.HTTPConnection:
        parts, through, timeout = urlsplit(where.url), where.proxy, self._options.connect_timeout_s
        host, port = str(parts.hostname), parts.port
        place = (str(through.hostname), through.port) if through else (host, port)
        if parts.scheme == "https":
            if self._tls is None:
                self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE"))
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *place, timeout=timeout, context=self._tls
            )
            if through:
                connection.set_tunnel(host, port)
        else:
            connection = http.client.HTTPConnection(*place, timeout=timeout)
        connection.connect()
        connection.sock.settimeout(self._options.read_timeout_s)
        return connection


def _receive(connection: http.client.HTTPConnection, answer: Answer, first: int, transfer: Transfer) -> bool:
    """The body into the transfer; returns whether all of it has been read. Raises ShortBody, EndsEarly, TooSlow."""
    wanted, promised, ranged = transfer.missing, answer.length, transfer.length is not None
    if answer.status != (206 if ranged else 200):
        raise StorageError(f"the endpoint answers {answer.status} to a GET with a Range header, wanted 206")
    total = None
    if ranged:
        content_range = answer.headers.get(b"content-range", b"").decode("latin-1")
        found = re.match(r"bytes (\d+)-\d+/(\d+|\*)", content_range)
        if found is None or int(found[1]) != first:
            raise ShortBody(f"range {content_range!r} came instead of one from {first}")
        total = int(found[2]) if found[2] != "*" else None
    if wanted is not None and promised is not None and promised > wanted:
        raise ShortBody(f"{promised:,} bytes came instead of {wanted:,}")
    complete = True
    if wanted is None or promised is None:
        _receive_pieces(answer, transfer)
    else:
        end = transfer.done + promised
        transfer.add(answer.first())
        transfer.receive(connection.sock, end - transfer.done)
        complete = transfer.done == end
    if transfer.missing:
        if total is not None and first + (wanted or 0) > total:
            raise EndsEarly
        raise ShortBody(f"the connection ended {transfer.missing:,} bytes early")
    return complete


def _receive_pieces(answer: Answer, transfer: Transfer) -> None:
    """A body whose length is the server's choice."""
    try:
        for piece in answer.pieces():
            if transfer.missing is not None and len(piece) > transfer.missing:
                raise ShortBody(f"more than the {transfer.length:,} wanted bytes came")
            transfer.add(piece)
    except BadAnswer as error:
        raise ShortBody(str(error)) from error


def _error_body(answer: Answer) -> bytes:
    """What comes of it: the status counts even where the explanation is cut off."""
    body = b""
    with contextlib.suppress(OSError):
        for piece in answer.pieces():
            body += piece
            if len(body) >= _ERROR_BYTES:
                break
    return body


def _proxy(url: str) -> SplitResult | None:
    """The proxy that the environment wants for a URL."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    return urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(parts.netloc) else None


def _head(url: str, proxy: SplitResult | None) -> str:
    """A request's lines up to what differs from range to range; a plain HTTP proxy wants the whole URL."""
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    target = url if proxy and parts.scheme == "http" else path
    name = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
    usual = {"http": 80, "https": 443}[parts.scheme]
    host = name if parts.port in (None, usual) else f"{name}:{parts.port}"  # as it was signed
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"


def _refusal(status: int, body: bytes) -> Exception:
    """The error that a status stands for, caused by the server's own answer."""
    code, message = (
        (match[1].decode(errors="replace") if (match := re.search(rb"<%b>([^<]*)</%b>" % (tag, tag), body)) else "")
        for tag in (b"Code", b"Message")
    )
    text = f"HTTP {status} {code} {message}".strip()
    error: Exception
    if status == 416:
        error = EndsEarly(text)
    elif status == 404:
        error = FileNotFoundError(text)
    elif status in (401, 403):
        error = PermissionError(text)
    else:
        passes = status in (408, 425, 429) or status >= 500 or code in ("SlowDown", "RequestTimeout")
        error = OSError(errno.EBUSY if passes else errno.EINVAL, text)
    error.__cause__ = Refusal(code or str(status), message)
    return error
