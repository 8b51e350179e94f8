"""The hot read path of a bucket: GETs of signed URLs over kept-alive connections, resumed where they broke off.

Why not the client's own reads: an asynchronous client hops between threads and buffers every body twice, which costs
more processor time than moving the bytes; and only a loop that sees each piece can keep what has arrived and notice a
connection that trickles.
"""

from __future__ import annotations

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
from urllib.parse import urlsplit

from cache_store.errors import StorageError
from cache_store.retry import EndsEarly, ShortBody, StorageOptions, Transfer

PIECE_BYTES = 1 << 20
SIGNED_FOR_S, SIGNED_ANEW_S = 3600, 900
"""Life of a signed URL, and the age at which it is signed anew."""
URLS_KEPT = 4096
_ERROR_BYTES = 1 << 16


class Refusal(Exception):
    """The server's own answer, in the form that S3 clients give it: the cause of the error that is raised."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.response = {"Error": {"Code": code, "Message": message}}


class RangeClient:
    """Reads objects through `sign(name) -> URL`; safe to use from several threads."""

    def __init__(self, sign: Callable[[str], str], options: StorageOptions) -> None:
        self._sign, self._options = sign, options
        self._urls: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._idle: list[http.client.HTTPConnection] = []  # appending and popping are atomic
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def read(self, name: str, offset: int, transfer: Transfer) -> None:
        """Go on with a transfer. Raises OSError of the kind that the refusal is, ShortBody, TooSlow, EndsEarly."""
        if transfer.length is None:  # a small object that may be replaced meanwhile, such as a manifest
            transfer.restart()
        first = offset + transfer.done
        headers = {}
        if transfer.missing is not None:
            headers["Range"] = f"bytes={first}-{first + transfer.missing - 1}"
        connection, response = self._request(name, headers)
        kept = False
        try:
            transfer.start()
            self._receive(connection, response, first, transfer)
            kept = response.isclosed() and not response.will_close
        finally:
            if kept and len(self._idle) < self._options.connections:
                self._idle.append(connection)
            else:
                response.close()
                connection.close()

    def _receive(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, first: int, transfer: Transfer
    ) -> None:
        wanted, promised, ranged = transfer.missing, response.length, transfer.length is not None
        if response.status != (206 if ranged else 200):
            raise StorageError(f"the endpoint answers {response.status} to a GET with a Range header, wanted 206")
        total = None
        if ranged:
            found = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.getheader("Content-Range", ""))
            if found is None or int(found[1]) != first:
                raise ShortBody(f"range {response.getheader('Content-Range')!r} came instead of one from {first}")
            total = int(found[2]) if found[2] != "*" else None
        if wanted is None or promised is None:
            _read_all(response, transfer)
        elif promised > wanted:
            raise ShortBody(f"{promised:,} bytes came instead of {wanted:,}")
        else:
            # What came with the headers stands in the response's buffer, of at most a piece; the rest needs no copy.
            end = transfer.done + promised
            transfer.add(response.read1(min(PIECE_BYTES, promised)))
            transfer.receive(connection.sock, end - transfer.done)
            if transfer.done == end:
                response.close()  # all of it has been read: the connection may serve the next request
        if transfer.missing:
            if total is not None and first + (wanted or 0) > total:
                raise EndsEarly
            raise ShortBody(f"the connection ended {transfer.missing:,} bytes early")

    def _request(
        self, name: str, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection with a good answer on it; a kept connection that has died meanwhile is replaced at once."""
        url, signed = self._url(name)
        while True:
            try:
                connection, used = self._idle.pop(), True
            except IndexError:
                connection, used = self._connect(url), False
            try:
                connection.request("GET", _target(url, connection), headers={**headers, "Accept-Encoding": "identity"})
                response = connection.getresponse()
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                if used and isinstance(error, ConnectionError):
                    continue
                if isinstance(error, http.client.HTTPException):
                    raise ShortBody(f"no valid answer: {error!r}") from error
                raise
            if response.status in (200, 206):
                return connection, response
            try:
                body = response.read(_ERROR_BYTES)
            finally:
                connection.close()
            if response.status == 403 and time.monotonic() - signed > 60:  # perhaps only the signature is too old
                self._forget(name)
                raise ShortBody("the signed URL was refused after some use")
            raise _refusal(response.status, body)

    def _url(self, name: str) -> tuple[str, float]:
        now = time.monotonic()
        with self._lock:
            found = self._urls.get(name)
        if found is None or now - found[1] > SIGNED_ANEW_S:
            found = self._sign(name), now
            with self._lock:
                self._urls[name] = found
                if len(self._urls) > URLS_KEPT:
                    self._urls.popitem(last=False)
        return found

    def _forget(self, name: str) -> None:
        with self._lock:
            self._urls.pop(name, None)

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts, timeout = urlsplit(url), self._options.connect_timeout_s
        host, port = str(parts.hostname), parts.port
        proxy = urllib.request.getproxies().get(parts.scheme)
        through = urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(parts.netloc) else None
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


def _read_all(response: http.client.HTTPResponse, transfer: Transfer) -> None:
    """A body whose length is the server's choice, piece by piece."""
    promised, before = response.length, transfer.done
    while (room := PIECE_BYTES if transfer.missing is None else min(PIECE_BYTES, transfer.missing)) and (
        piece := response.read1(room)
    ):
        transfer.add(piece)
    if promised is not None and transfer.done - before < promised:
        raise ShortBody(f"the connection ended {promised - transfer.done + before:,} bytes early")
    response.close()


def _target(url: str, connection: http.client.HTTPConnection) -> str:
    """What stands in the request line: path and query, or the whole URL for a plain HTTP proxy."""
    parts = urlsplit(url)
    if parts.scheme == "http" and (connection.host, connection.port) != (parts.hostname, parts.port or 80):
        return url
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


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
