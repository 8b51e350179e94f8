"""A sample's row group read without a Parquet library and without the shard's footer: the hot path of training.

Our shards hold one value per column chunk in one page, so a row group is eight times (page header, page), one after
another. Anything that does not look exactly like that is left to the Parquet reader (`ParquetLayout`).
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import numpy as np

from cache_store.frame import Frame, frame_of, small_content
from cache_store.shard import StoredSample

COLUMNS = ("sample_id", "metadata", "input_ids", "loss_mask", "cap_hi", "cap_lo", "last_hi", "last_lo")
COMPRESSED = ("sample_id", "metadata", "input_ids", "loss_mask", "cap_hi", "last_hi")
HIGH_PLANES = ("cap_hi", "last_hi")

# Thrift's compact form of PageHeader(type DATA_PAGE, sizes, DataPageHeader(1 value, PLAIN, RLE, RLE, no statistics)).
_VARINT = rb"([\x80-\xff]*[\x00-\x7f])"
_HEADER = re.compile(
    rb"\x15\x00\x15" + _VARINT + rb"\x15" + _VARINT + rb"\x2c\x15\x02\x15\x00\x15\x06\x15\x06(?:\x1c\x00)?\x00\x00"
)
_LENGTH = struct.Struct("<I")  # a PLAIN byte array is its length and its bytes


def read_row_group(data: bytes | memoryview) -> StoredSample | None:
    """A whole sample from the bytes of its row group; None when they are not laid out as our shards are."""
    values: list[Any] = []
    view, start = memoryview(data), 0
    for name in COLUMNS:
        header = _HEADER.match(data, start)
        if header is None:
            return None
        size, stored = _unsigned(header[1]), _unsigned(header[2])
        page, start = view[header.end() : header.end() + stored], header.end() + stored
        value = _lazy(page, size) if name in HIGH_PLANES else _value(page, size, compressed=name in COMPRESSED)
        if value is None:
            return None
        values.append(value)
    if start != len(data):
        return None
    sample_id, metadata, input_ids, loss_mask, *planes = values
    try:
        facts = json.loads(metadata.tobytes())
        name = sample_id.tobytes().decode()
        ids = input_ids.view("<i4")
    except ValueError:
        return None
    return StoredSample(name, ids, loss_mask != 0, facts, (planes[0], planes[1]), (planes[2], planes[3]))


def _lazy(page: memoryview, size: int) -> Frame | np.ndarray | None:
    """A high plane, still compressed. The value's own length stands at the start of the frame's content."""
    return frame_of(page, size, skip=_LENGTH.size) if size > _LENGTH.size else _value(page, size, compressed=True)


def _value(page: memoryview, size: int, *, compressed: bool) -> np.ndarray | None:
    """The page's only value, uint8; None when sizes disagree or the page is damaged."""
    content = small_content(page, size) if compressed else page
    if content is None or len(content) != size or size < _LENGTH.size:
        return None
    if _LENGTH.unpack_from(content)[0] != size - _LENGTH.size:
        return None
    return np.frombuffer(content, np.uint8, offset=_LENGTH.size)


def _unsigned(varint: bytes) -> int:
    """A zigzag-coded size: seven bits per byte, the lowest first. Sizes are never negative."""
    if len(varint) == 1:
        return varint[0] >> 1
    value = 0
    for byte in reversed(varint):
        value = value << 7 | byte & 0x7F
    return value >> 1
