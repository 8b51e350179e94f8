from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cache_store import http_answer, http_ranges
from cache_store.errors import StorageError
from cache_store.http_ranges import RangeClient
from cache_store.retry import EndsEarly, ShortBody, StorageOptions, Transfer, with_retries

OPTIONS = StorageOptions(attempts=3, first_delay_s=0.001, connections=4)
CONTENT = bytes(range(256)) * 20


@dataclass
class Server:
    """What the next answers are, and what was asked."""

    port: int = 0
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    asked: list[tuple[str, str | None, Any]] = field(default_factory=list)

    def sign(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/bucket/{name}?X-Signature={len(self.asked)}"


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted, self.client_address))
            if state.answers:
                status, headers, body = state.answers.pop(0)
            elif wanted is None:
                status, headers, body = 200, {}, CONTENT
            else:
                first, last = (int(part or len(CONTENT)) for part in wanted.removeprefix("bytes=").split("-"))
                body = CONTENT[first : last + 1]
                status, headers = 206, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(CONTENT)}"}
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = "Connection" in headers

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def client(server: Server) -> RangeClient:
    return RangeClient(server.sign, OPTIONS)


def read(client: RangeClient, offset: int, length: int | None, name: str = "object") -> bytes:
    transfer = Transfer(length, OPTIONS)
    client.read(name, offset, transfer)
    return transfer.content()


def test_ranges_and_whole_objects_over_one_connection(client: RangeClient, server: Server) -> None:
    assert read(client, 10, 100) == CONTENT[10:110]
    assert read(client, 0, None) == CONTENT
    assert read(client, 5000, 120) == CONTENT[5000:5120]
    assert [asked[1] for asked in server.asked] == ["bytes=10-109", None, "bytes=5000-5119"]
    assert len({asked[2] for asked in server.asked}) == 1, "the connection is kept"
    assert len({asked[0] for asked in server.asked}) == 1, "and the URL signed once"


def test_a_kept_connection_that_died_is_replaced_at_once(client: RangeClient, server: Server) -> None:
    assert read(client, 0, 10) == CONTENT[:10]
    for connection in client._idle:
        connection.sock.shutdown(2)  # as a server does that closes idle connections
    assert read(client, 10, 10) == CONTENT[10:20]


def test_an_object_that_ends_early_is_no_broken_connection(client: RangeClient) -> None:
    with pytest.raises(EndsEarly):
        read(client, len(CONTENT) - 10, 20)


def test_another_range_than_asked_for_is_refused(client: RangeClient, server: Server) -> None:
    server.answers.append((206, {"Content-Range": "bytes 0-9/5120"}, CONTENT[:10]))
    with pytest.raises(ShortBody, match=r"'bytes 0-9/5120' came instead of one from 100"):
        read(client, 100, 10)


def test_more_than_asked_for_is_refused(client: RangeClient, server: Server) -> None:
    server.answers.append((206, {"Content-Range": "bytes 100-119/5120"}, CONTENT[100:120]))
    with pytest.raises(ShortBody, match="20 bytes came instead of 10"):
        read(client, 100, 10)
    assert read(client, 100, 10) == CONTENT[100:110], "and the connection with the rest on it is not used again"


def test_large_ranges_arrive_in_place(client: RangeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "_HEAD_BYTES", 64)  # far less than a head
    for length in (1, 100, 4000, len(CONTENT)):
        assert read(client, 0, length) == CONTENT[:length]
    transfer = Transfer(len(CONTENT), OPTIONS)
    transfer.start()
    transfer.add(CONTENT[:100])  # as an earlier connection has left it
    client.read("object", 0, transfer)
    assert transfer.content() == CONTENT


def test_a_server_without_ranges_is_named(client: RangeClient, server: Server) -> None:
    server.answers.append((200, {}, CONTENT))
    with pytest.raises(StorageError, match="answers 200 to a GET with a Range header, wanted 206"):
        read(client, 100, 10)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, FileNotFoundError), (403, PermissionError), (400, OSError), (503, OSError), (416, EndsEarly)],
)
def test_refusals_keep_the_servers_own_code(
    client: RangeClient, server: Server, status: int, kind: type[Exception]
) -> None:
    body = b"<Error><Code>SomeCode</Code><Message>because</Message></Error>"
    server.answers.append((status, {}, body))
    with pytest.raises(kind, match=f"HTTP {status} SomeCode because") as caught:
        read(client, 0, 10)
    assert caught.value.__cause__.response["Error"]["Code"] == "SomeCode"  # type: ignore[union-attr]


@pytest.mark.parametrize(("status", "kind"), [(404, FileNotFoundError), (416, EndsEarly), (403, PermissionError)])
def test_a_refusal_counts_even_where_its_explanation_is_cut(
    client: RangeClient, server: Server, status: int, kind: type[Exception]
) -> None:
    server.answers.append((status, {"Content-Length": "300", "Connection": "close"}, b"<Error><Code>Some"))
    with pytest.raises(kind, match=f"HTTP {status}"):
        read(client, 0, 10)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("http://minio.local:80", "minio.local"),
        ("https://minio.local:443", "minio.local"),
        ("https://minio.local:80", "minio.local:80"),
        ("http://user:secret@minio.local:9000", "minio.local:9000"),
        ("http://[::1]:9000", "[::1]:9000"),
    ],
)
def test_the_host_is_the_one_that_was_signed(endpoint: str, host: str) -> None:
    head = http_ranges._head(f"{endpoint}/bucket/name?sig=1", None)
    assert head.splitlines()[:2] == ["GET /bucket/name?sig=1 HTTP/1.1", f"Host: {host}"]


def test_an_old_signature_is_made_anew(client: RangeClient, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    read(client, 0, 10)
    monkeypatch.setattr(http_ranges, "SIGNED_ANEW_S", -1.0)
    read(client, 0, 10)
    assert server.asked[0][0] != server.asked[1][0]
    monkeypatch.setattr(http_ranges, "SIGNED_ANEW_S", 1e9)
    server.answers.append((403, {}, b""))
    now = http_ranges.time.monotonic()
    monkeypatch.setattr(http_ranges.time, "monotonic", lambda: now + 3600)
    transfer = Transfer(10, OPTIONS)
    with_retries(lambda: client.read("object", 0, transfer), OPTIONS)
    assert transfer.content() == CONTENT[:10]
    assert server.asked[3][0] != server.asked[2][0], "refused after long use: perhaps only the signature is too old"


def test_a_proxy_from_the_environment_is_used(
    client: RangeClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("no_proxy", "")
    far = RangeClient(lambda name: f"http://bucket.invalid/{name}?sig=1", OPTIONS)
    assert read(far, 3, 4) == CONTENT[3:7]
    assert server.asked[0][0] == "http://bucket.invalid/object?sig=1"
