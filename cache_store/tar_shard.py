"""One WebDataset shard: a plain USTAR archive, a sample is a run of adjacent members, so it is one range of bytes.

Members are named `<key>.<what>` (MEMBERS); the `hi` planes are zstd frames, everything else is stored as it is. Nothing
but the members' own headers is needed to read a range (FORMAT.md, "Tar shards").
Legend: T tokens, L captured layers, P stored last hidden states, D hidden size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_store.errors import CacheError, SampleRejected
from cache_store.fields import FieldCodecs, StoredPlanes, TensorError, merge_errors
from cache_store.frame import frame_of, literal_frames
from cache_store.manifest import SampleRecord
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import CopiedFields, EncodedSample, StoredSample, TextCut, checksum, encode_sample

BLOCK = 512
END = bytes(2 * BLOCK)
"""Two blocks of zeros end an archive."""
MAX_MEMBER_BYTES = 8 << 30
"""USTAR writes sizes as 11 octal digits."""
MEMBERS = ("json", "ids.npy", "mask.npy", "cap_hi.zst", "cap_lo.bin", "last_hi.zst", "last_lo.bin")
_SAFE_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")
_PLANE_MEMBERS = MEMBERS[3:]
_HEADER = struct.Struct("<100s24x12s12x8s1s100x6s82x1s166x")
"""Name, size, checksum, type, magic and the first byte of the name's prefix in a USTAR header."""
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(<i4|\|b1)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n", re.DOTALL
)
_TEXT_SLACK = 8 << 10  # bytes read beyond ids and mask for the JSON member; a longer one costs reading the sample


def member_key(sample_id: str) -> str:
    """Name of a sample's members before the first dot: its id where that is plain, else `~` and a hash of it."""
    if _SAFE_KEY.fullmatch(sample_id):
        return sample_id
    return "~" + hashlib.sha256(sample_id.encode()).hexdigest()[:32]


class TarShardWriter:
    """Writes samples into one local file; nobody may read it before `finish`."""

    def __init__(self, path: Path, spec: CacheSpec, codecs: FieldCodecs) -> None:
        self.path, self.spec, self.codecs = path, spec, codecs
        self.ids: list[str] = []
        self._rows: list[tuple[EncodedSample, int, int]] = []
        self._compressor = literal_frames()
        self._sink = path.open("wb")

    def add(self, sample: TargetSample, copied: CopiedFields | None = None) -> None:
        """Append one sample, already validated. Raises SampleRejected for one that no member can hold."""
        row = encode_sample(self.spec, self.codecs, sample, copied)
        planes = [
            self._compressor.compress(plane.data) if name.endswith(".zst") and plane.size else plane.data
            for name, plane in zip(_PLANE_MEMBERS, row.planes, strict=True)
        ]
        if (largest := max(len(plane) for plane in planes)) >= MAX_MEMBER_BYTES:
            raise SampleRejected(sample.sample_id, f"plane of {largest} bytes, members of a tar end at 8 GiB")
        facts = self._facts(row, sample)
        contents: list[Any] = [facts, _npy(row.input_ids), _npy(row.loss_mask.view(np.bool_)), *planes]
        key, start = member_key(row.sample_id), self._sink.tell()
        for name, content in zip(MEMBERS, contents, strict=True):
            if len(content) or name not in _PLANE_MEMBERS:
                self._sink.write(_header(f"{key}.{name}", len(content)))
                self._sink.write(content)
                self._sink.write(bytes(-len(content) % BLOCK))
        self.ids.append(row.sample_id)
        self._rows.append((row.without_planes(), start, self._sink.tell() - start))

    def _facts(self, row: EncodedSample, sample: TargetSample) -> bytes:
        """The JSON member: what a program needs to read the other members of the sample."""
        facts = {
            "sample_id": row.sample_id,
            "metadata": row.metadata,
            **_spec_facts(self.spec),
            "shape": list(sample.hidden_states.shape),
        }
        return json.dumps(facts, ensure_ascii=False).encode()

    def tell(self) -> int:
        """Bytes written so far."""
        return self._sink.tell()

    def errors(self) -> tuple[TensorError, ...]:
        """What the codecs measured, one entry per tensor."""
        return merge_errors(error for row, _, _ in self._rows for error in row.errors)

    def finish(self) -> tuple[int, int, str, tuple[SampleRecord, ...]]:
        """Close, read the file back and check it: (bytes, footer bytes: 0, crc32c, one record per sample)."""
        self._sink.write(END)
        self._sink.close()
        with pa.memory_map(str(self.path)) as source:
            view = memoryview(source.read_buffer())
            records = []
            for row, offset, length in self._rows:
                data = view[offset : offset + length]
                if json.loads(bytes(parse_members(data)["json"]))["sample_id"] != row.sample_id:
                    raise CacheError(f"{self.path}: another sample than {row.sample_id!r} at {offset}")
                records.append(row.record(offset, data))
            places = [(record.offset, record.length) for record in records]
            if problems := TarLayout(b"").problems(self.spec, view, places):
                raise CacheError(f"{self.path}: {problems[0][1]}")
            return len(view), 0, checksum(view), tuple(records)

    def abandon(self) -> None:
        """Drop the unfinished file."""
        with contextlib.suppress(OSError):  # a full disk: the last buffer cannot be written, and need not be
            self._sink.close()
        self.path.unlink(missing_ok=True)


class TarLayout:
    """Reads samples from their ranges; a tar has no directory, so there is nothing to hold."""

    def __init__(self, footer: bytes) -> None:
        if footer:
            raise CacheError(f"footer of {len(footer)} bytes, a tar has none")

    def text_range(self, row: int, where: tuple[int, int], tokens: int) -> tuple[int, int]:
        """(offset, length) that holds the members before the planes, if the JSON member is not unusually long."""
        offset, length = where
        return offset, min(length, 5 * tokens + 8 * BLOCK + _TEXT_SLACK)

    def read(self, row: int, offset: int, data: bytes | memoryview, *, states: bool = True) -> StoredSample:
        """Decode one sample from its byte range (without states: its text range). Raises CacheError."""
        members = parse_members(memoryview(data), whole=states)
        try:
            facts = json.loads(bytes(members["json"]))
            sample_id, metadata = facts["sample_id"], facts["metadata"]
            input_ids, loss_mask = (_array(members[name]) for name in MEMBERS[1:3])
            values = _plane_values(facts, loss_mask)
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise CacheError(f"sample {row} cannot be decoded: {type(error).__name__}: {error}") from error
        nothing = np.empty(0, np.uint8)
        captured: StoredPlanes = (nothing, nothing)
        last: StoredPlanes = (nothing, nothing)
        if states:
            captured, last = (_planes(members, field, values[field]) for field in ("cap", "last"))
        return StoredSample(sample_id, input_ids, loss_mask, metadata, captured, last)

    def problems(self, spec: CacheSpec, content: memoryview, ranges: list[tuple[int, int]]) -> list[tuple[str, str]]:
        """(kind, detail) of samples that do not fill the archive up to its end, or state other facts than settings."""
        found, end, wanted = [], 0, _spec_facts(spec)
        for number, (offset, length) in enumerate(ranges):
            if offset != end or length % BLOCK:
                found.append(("wrong-layout", f"sample {number} lies at {offset, length}, wanted blocks from {end}"))
            end = offset + length
            try:
                facts = json.loads(bytes(parse_members(content[offset:end])["json"]))
            except (CacheError, ValueError) as error:
                found.append(("wrong-layout", f"sample {number}: {error}"))
                continue
            if other := [name for name, value in wanted.items() if facts.get(name) != value]:
                found.append(
                    ("wrong-layout", f"sample {number}: {', '.join(other)} differ from the settings in cache.json")
                )
        if len(content) != end + len(END):
            detail = f"{len(content)} bytes, wanted {len(END)} after the {len(ranges)} samples of the record, at {end}"
            found.append(("wrong-counts", detail))
        elif bytes(content[end:]) != END:
            found.append(("wrong-layout", "no zeros at the end of the archive"))
        return found


def _spec_facts(spec: CacheSpec) -> dict[str, Any]:
    """What the JSON member of every sample of a cache repeats."""
    return {
        "format_version": spec.format_version,
        "dtype": "bfloat16",
        "codec": spec.codec,
        "last_codec": spec.last_codec,
        "layer_ids": list(spec.layer_ids),
        "last_hidden": spec.last_hidden,
    }


def parse_members(data: memoryview, *, whole: bool = True) -> dict[str, memoryview]:
    """Members of one sample by their names after the key; a range may end early unless `whole`.

    Raises CacheError for a damaged header, members of several samples, unknown members, or missing bytes, and TextCut
    for a range that ends before its text does.
    """
    found: dict[str, memoryview] = {}
    keys: set[str] = set()
    position = 0
    while position < len(data):
        try:
            member, size = _name_and_size(data[position : position + BLOCK])
        except ValueError as error:
            if not whole and position + BLOCK > len(data):
                break
            raise CacheError(f"damaged tar header at {position} of the sample: {error}") from error
        key, _, name = member.partition(".")
        keys.add(key)
        if name not in MEMBERS or name in found or len(keys) > 1:
            raise CacheError(f"member {member!r} at {position} of the sample is not one of its own")
        position += BLOCK
        if position + size > len(data):
            if not whole:
                break
            raise CacheError(f"member {member!r} has {size} bytes, the sample ends after {len(data)}")
        found[name] = data[position : position + size]
        position += size + -size % BLOCK
    if whole and position != len(data):
        raise CacheError(f"the sample's members end at {position}, its range after {len(data)} bytes")
    if missing := [name for name in MEMBERS[:3] if name not in found]:
        kind = CacheError if whole else TextCut
        raise kind(f"members {', '.join(missing)} are missing from the sample's {len(data)} bytes")
    return found


def _name_and_size(block: memoryview) -> tuple[str, int]:
    """Of a header as `_header` makes them; a tenth of the time that tarfile takes. Raises ValueError."""
    if len(block) != BLOCK:
        raise ValueError("no USTAR header")
    name, size, stated, kind, magic, prefix = _HEADER.unpack(block)
    if magic != b"ustar\0":
        raise ValueError("no USTAR header")
    # The checksum is the sum of all bytes, its own field as spaces; adler32's low half is 1 + a sum of all bytes.
    total = int(stated.rstrip(b"\0 "), 8) - 8 * 0x20 + sum(stated)
    if (1 + total) % 65521 != zlib.adler32(block) & 0xFFFF:
        raise ValueError("bad checksum")
    if kind != b"0" or prefix != b"\0":
        raise ValueError("not a plain file with a short name")
    return name.rstrip(b"\0").decode(), int(size.rstrip(b"\0 "), 8)


def _array(member: memoryview) -> np.ndarray:
    """A member as `_npy` makes them: a vector of int32 or bool, without a copy. Raises ValueError."""
    match = _NPY.match(member)
    if match is None:
        raise ValueError("no vector in NumPy's format 1.0")
    found = np.frombuffer(member, match[1].decode(), offset=match.end())
    if len(found) != int(match[2]):
        raise ValueError(f"{len(found)} values, its header says {int(match[2])}")
    return found


def _plane_values(facts: dict[str, Any], loss_mask: np.ndarray) -> dict[str, int]:
    """Bytes of each field's `hi` plane once decompressed: one per value, none for codec raw."""
    layers, tokens, channels = facts["shape"]
    rows = tokens if facts["last_hidden"] == "all" else int(np.count_nonzero(loss_mask[1:]))
    counts = {"cap": (facts["codec"], layers * tokens * channels), "last": (facts["last_codec"], rows * channels)}
    return {field: 0 if name == "raw" else count for field, (name, count) in counts.items()}


def _planes(members: dict[str, memoryview], field: str, size: int) -> StoredPlanes:
    """A field's planes, the first one still compressed. Raises CacheError."""
    frame, low = members.get(f"{field}_hi.zst"), members.get(f"{field}_lo.bin")
    stored = np.frombuffer(low, np.uint8) if low is not None else np.empty(0, np.uint8)
    if frame is None:
        if size:
            raise CacheError(f"{field}_hi.zst is missing, wanted a plane of {size} bytes")
        return np.empty(0, np.uint8), stored
    lazy = frame_of(frame, size)
    if lazy is None:
        raise CacheError(f"{field}_hi.zst is no zstd frame of {size} bytes")
    return lazy, stored


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(format=tarfile.USTAR_FORMAT, encoding="utf-8", errors="strict")


def _npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()
