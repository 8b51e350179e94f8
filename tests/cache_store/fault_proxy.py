"""A small HTTP proxy that stands between a client and a real S3 server and misbehaves on demand."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Kind = Literal[
    "status", "reset", "short", "trickle", "lost-answer", "corrupt", "stale-listing", "silent", "less", "corrupt-upload"
]


@dataclass
class Fault:
    """One kind of misbehaviour, for the next `times` requests that match."""

    kind: Kind
    times: int = 1
    method: str = "GET"
    path_has: str = ""
    status: int = 503
    code: str = "SlowDown"
    after_bytes: int = 0
    """How much of the body passes before it goes wrong."""
    pause_s: float = 0.05
    """trickle: between two bytes; silent: before the connection is dropped."""


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    range: str | None
    at: float


@dataclass
class FaultProxy:
    """A running proxy: append to `faults`, look at `seen`."""

    upstream_port: int
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, kind: Kind, **settings: object) -> Fault:
        fault = Fault(kind, **settings)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.path_has in path:
                    fault.times -= 1
                    return fault
        return None

    def ranges(self, part: str) -> list[str | None]:
        """Range headers of the GETs whose path has this part, in order."""
        return [item.range for item in self.seen if item.method == "GET" and part in item.path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _handle(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.seen.append(Seen(self.command, self.path, self.headers.get("Range"), time.monotonic()))
        fault = proxy.take(self.command, self.path)
        if fault is not None and fault.kind == "status":
            text = f"<Error><Code>{fault.code}</Code><Message>made by the test</Message></Error>".encode()
            self._answer(fault.status, [("Content-Type", "application/xml")], text)
            return
        if fault is not None and fault.kind == "silent":
            time.sleep(fault.pause_s)
            self._reset()
            return
        if fault is not None and fault.kind == "corrupt-upload":
            body, fault = bytes([body[0] ^ 0x40]) + body[1:], None
        status, headers, content = self._upstream(body)
        listing = self.command == "GET" and "list-type=2" in self.path
        if fault is not None and fault.kind == "stale-listing" and listing and self.path in proxy.listings:
            status, headers, content = proxy.listings[self.path]
        elif listing:
            proxy.listings.setdefault(self.path, (status, headers, content))
        self._deliver(fault, status, headers, content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _upstream(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream_port, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # the Host header too: it is signed
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            dropped = ("connection", "transfer-encoding", "content-length")
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in dropped]
            length = answer.getheader("Content-Length")
            if self.command == "HEAD" and length is not None:
                headers.append(("Content-Length", length))
            return answer.status, headers, content
        finally:
            connection.close()

    def _deliver(self, fault: Fault | None, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        kind = fault.kind if fault is not None else None
        if fault is None or kind == "stale-listing":
            self._answer(status, headers, content)
        elif kind == "lost-answer":
            self._reset()
        elif kind == "corrupt":
            place = min(fault.after_bytes, len(content) - 1)
            changed = content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :]
            self._answer(status, headers, changed)
        elif kind == "less":  # a shorter body that the Content-Length agrees with
            self._answer(status, headers, content[: fault.after_bytes])
        else:
            self._answer(status, headers, content[: fault.after_bytes], promised=len(content))
            self._go_wrong(fault, content)

    def _go_wrong(self, fault: Fault, content: bytes) -> None:
        self.close_connection = True
        if fault.kind == "reset":
            self._reset()
        elif fault.kind == "trickle":
            for place in range(fault.after_bytes, len(content)):
                try:
                    self.wfile.write(content[place : place + 1])
                    self.wfile.flush()
                except OSError:
                    return  # the client has left: what the test wants
                time.sleep(fault.pause_s)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, promised: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD" or not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content) if promised is None else promised))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            self.wfile.flush()

    def _reset(self) -> None:
        """Close with a TCP reset instead of an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A broken connection is what this server is for."""


@contextmanager
def fault_proxy(upstream_port: int) -> Iterator[FaultProxy]:
    """A proxy on a free port in threads of this process, closed at the end."""
    proxy = FaultProxy(upstream_port)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", 0), handler)
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
