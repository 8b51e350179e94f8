from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.http_answer import Answer, BadAnswer

BODY = bytes(range(256)) * 3


def answer_to(*parts: bytes, stays: bool = False) -> tuple[Answer, socket.socket]:
    """The answer that a peer gives by sending the parts one after another and (unless it stays) closing."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for part in parts:
            theirs.sendall(part)
        if not stays:
            theirs.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        ours.settimeout(10)
        return Answer(ours), ours
    finally:
        thread.join()


def cut(content: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted(place % (len(content) + 1) for place in cuts)
    for start, end in zip([0, *places], [*places, len(content)], strict=True):
        if end > start:
            yield content[start:end]


def rest_of(answer: Answer, connection: socket.socket) -> bytes:
    """As a reader of a body of known length takes it."""
    assert answer.length is not None
    content = answer.first()
    while len(content) < answer.length:
        content += connection.recv(answer.length - len(content))
    return content


@given(st.lists(st.integers(0, 2000), max_size=6))
def test_head_and_body_come_in_any_pieces(cuts: list[int]) -> None:
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-767/900\r\nContent-Length: 768\r\n\r\n"
    answer, connection = answer_to(*cut(head + BODY, cuts))
    assert (answer.status, answer.length, answer.keeps_alive) == (206, len(BODY), True)
    assert answer.headers[b"content-range"] == b"bytes 0-767/900"
    assert rest_of(answer, connection) == BODY


@given(st.lists(st.integers(0, 2000), max_size=6))
def test_a_chunked_body_comes_in_any_pieces(cuts: list[int]) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (BODY[:1], BODY[1:700], BODY[700:]))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer, _ = answer_to(*cut(head + chunks + b"0\r\n\r\n", cuts), stays=True)
    assert (answer.status, answer.length) == (200, None)
    assert b"".join(answer.pieces()) == BODY
    assert answer.complete


def test_a_body_may_end_with_the_connection() -> None:
    answer, _ = answer_to(b"HTTP/1.1 200 OK\r\n\r\n", BODY)
    assert (answer.length, answer.keeps_alive) == (None, False)
    assert b"".join(answer.pieces()) == BODY


def test_an_interim_answer_does_not_count() -> None:
    answer, connection = answer_to(
        b"HTTP/1.1 100 Continue\r\nX-Interim: 1\r\n\r\nHTTP/1.1 503 Slow Down\r\nContent-Length: 3\r\n", b"\r\nabc"
    )
    assert (answer.status, answer.length) == (503, 3)
    assert b"x-interim" not in answer.headers
    assert rest_of(answer, connection) == b"abc"


def test_a_server_that_closes_says_so() -> None:
    answer, _ = answer_to(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert not answer.keeps_alive
    assert b"".join(answer.pieces()) == b""


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"])
def test_nothing_may_follow_the_answer(extra: bytes) -> None:
    with pytest.raises(BadAnswer, match="no valid answer"):
        answer_to(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc" + extra)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "the connection was closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no valid answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "no valid answer"),
    ],
)
def test_what_is_no_answer_is_refused(sent: bytes, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        answer_to(sent)


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked\r\n\r\n300\r\nabc", b"Content-Length: 9\r\n\r\nabc"])
def test_a_body_that_ends_early_is_no_body(head: bytes) -> None:
    answer, _ = answer_to(b"HTTP/1.1 200 OK\r\n" + head)
    with pytest.raises(BadAnswer, match="ended within the answer"):
        list(answer.pieces())
