from __future__ import annotations

import io
import itertools
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache_store import tar_shard
from cache_store.errors import CacheError, SampleRejected
from cache_store.fields import FieldCodec, FieldCodecs
from cache_store.manifest import SampleRecord
from cache_store.schema import CacheSpec, TargetSample
from cache_store.shard import TextCut
from cache_store.tar_shard import MEMBERS, TarLayout, TarShardWriter, member_key
from tests.cache_store.samples import make_sample, make_spec

ODD_IDS = ["a/b", "x.y", "ü", "", "a" * 200, "~0", "a b", "plain-id_7"]


def codecs_of(spec: CacheSpec) -> FieldCodecs:
    ones = np.ones((spec.num_layers, spec.hidden_size), np.float32)
    return FieldCodecs(
        FieldCodec(spec.codec, ones if spec.codec == "i8cr" else None),
        FieldCodec(spec.last_codec, ones[:1] if spec.last_codec == "i8cr" else None),
    )


def write_shard(path: Path, spec: CacheSpec, samples: list[TargetSample]) -> tuple[int, tuple[SampleRecord, ...]]:
    writer = TarShardWriter(path, spec, codecs_of(spec))
    for sample in samples:
        writer.add(sample)
    num_bytes, footer_bytes, _, records = writer.finish()
    assert footer_bytes == 0
    return num_bytes, records


def states_by_hand(facts: dict[str, Any], field: str, read: Any) -> np.ndarray:
    """Nothing of this project: FORMAT.md's two lines for bss1."""
    high = np.frombuffer(zstandard.ZstdDecompressor().decompress(read(f"{field}_hi.zst")), "u1")
    low = np.frombuffer(read(f"{field}_lo.bin"), "u1")
    return (high.astype("u2") << 8 | low).reshape(-1, facts["shape"][2])


def needed(sample: TargetSample) -> np.ndarray:
    return sample.last_hidden_state[:-1][sample.loss_mask[1:]]


def test_tarfile_gives_everything_back(tmp_path: Path) -> None:
    spec = make_spec(format="tar")
    samples = [make_sample(spec, number) for number in range(3)]
    write_shard(tmp_path / "s.tar", spec, samples)
    with tarfile.open(tmp_path / "s.tar") as tar:
        names = tar.getnames()
        assert names == [f"{sample.sample_id}.{name}" for sample in samples for name in MEMBERS]
        for sample in samples:

            def read(name: str, key: str = sample.sample_id) -> bytes:
                return tar.extractfile(f"{key}.{name}").read()

            facts = json.loads(read("json"))
            assert facts["sample_id"] == sample.sample_id
            assert facts["metadata"] == sample.metadata
            assert facts["layer_ids"] == [0, 2]
            assert np.array_equal(np.load(io.BytesIO(read("ids.npy"))), sample.input_ids)
            assert np.array_equal(np.load(io.BytesIO(read("mask.npy"))), sample.loss_mask)
            captured = states_by_hand(facts, "cap", read).reshape(facts["shape"])
            assert np.array_equal(captured, sample.hidden_states)
            assert np.array_equal(states_by_hand(facts, "last", read), needed(sample))


def test_webdataset_groups_the_samples(tmp_path: Path) -> None:
    spec = make_spec(format="tar")
    samples = [make_sample(spec, number, sample_id=ODD_IDS[number]) for number in (0, 1, 2, 7)]
    write_shard(tmp_path / "s.tar", spec, samples)
    stream = webdataset.WebDataset(str(tmp_path / "s.tar"), shardshuffle=False).decode()
    for found, sample in itertools.zip_longest(stream, samples):
        assert found["json"]["sample_id"] == sample.sample_id
        assert np.array_equal(found["ids.npy"], sample.input_ids)
        assert found["mask.npy"].dtype == bool
        captured = states_by_hand(found["json"], "cap", found.__getitem__)
        assert np.array_equal(captured.reshape(sample.hidden_states.shape), sample.hidden_states)


def test_the_tar_and_zstd_programs_read_it(tmp_path: Path) -> None:
    spec = make_spec(format="tar", codec="raw")
    sample = make_sample(spec, 0)
    write_shard(tmp_path / "s.tar", spec, [sample])
    listed = subprocess.run(["tar", "-tf", tmp_path / "s.tar"], check=True, capture_output=True, text=True)
    assert listed.stderr == ""
    assert listed.stdout.split() == [f"s0000.{name}" for name in MEMBERS if not name.endswith("zst")]
    subprocess.run(["tar", "-xf", tmp_path / "s.tar", "-C", tmp_path], check=True)
    assert (tmp_path / "s0000.cap_lo.bin").read_bytes() == sample.hidden_states.astype("<u2").tobytes()


def test_names_and_order_are_plain_ustar(tmp_path: Path) -> None:
    spec = make_spec(format="tar")
    write_shard(tmp_path / "s.tar", spec, [make_sample(spec, n, sample_id=name) for n, name in enumerate(ODD_IDS)])
    content = (tmp_path / "s.tar").read_bytes()
    assert content[257:265] == b"ustar\x0000"
    with tarfile.open(tmp_path / "s.tar") as tar:
        members = tar.getmembers()
    assert all(member.isreg() and not member.pax_headers for member in members)
    keys = [member.name.split(".")[0] for member in members]
    assert len(set(keys)) == len(ODD_IDS), "an id with dots or slashes gets a name of its own"
    assert [key for key, _ in itertools.groupby(keys)] == [member_key(name) for name in ODD_IDS]


def test_bytes_stay_close_to_the_payload(tmp_path: Path) -> None:
    spec = make_spec(format="tar", codec="raw", hidden_size=512, last_hidden="all")
    samples = [make_sample(spec, number, tokens=150) for number in range(3)]
    num_bytes, _ = write_shard(tmp_path / "s.tar", spec, samples)
    payload = sum(sample.hidden_states.nbytes + sample.last_hidden_state.nbytes for sample in samples)
    assert num_bytes <= 1.02 * payload


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    codec=st.sampled_from(["bss1", "raw", "i8cr", "f8r"]),
    last_hidden=st.sampled_from(["needed", "all"]),
)
def test_a_sample_is_decoded_from_its_range_alone(
    tmp_path_factory: pytest.TempPathFactory, data: Any, codec: str, last_hidden: str
) -> None:
    spec = make_spec(format="tar", codec=codec, last_hidden=last_hidden, hidden_size=3)
    samples, largest = [], 0xFFFF if codec in ("bss1", "raw") else 0x7F7F  # any pattern, or finite ones
    for number in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.integers(1, 9))
        states = data.draw(hnp.arrays(np.uint16, (2, tokens, 3), elements=st.integers(0, largest)))
        mask = data.draw(hnp.arrays(bool, tokens))
        samples.append(make_sample(spec, number, tokens=tokens, hidden_states=states, loss_mask=mask))
    path = tmp_path_factory.mktemp("shard") / "s.tar"
    _, records = write_shard(path, spec, samples)
    content, layout = path.read_bytes(), TarLayout(b"")
    for row, (sample, record) in enumerate(zip(samples, records, strict=True)):
        where = record.offset, record.length
        stored = layout.read(row, record.offset, content[record.offset : record.offset + record.length])
        start, length = layout.text_range(row, where, record.tokens)
        assert record.offset <= start
        assert start + length <= record.offset + record.length
        text = layout.read(row, start, content[start : start + length], states=False)
        for found in (stored, text):
            assert found.sample_id == sample.sample_id
            assert found.metadata == sample.metadata
            assert np.array_equal(found.input_ids, sample.input_ids)
            assert np.array_equal(found.loss_mask, sample.loss_mask)
        if codec in ("bss1", "raw"):
            out = np.empty_like(sample.hidden_states)
            codecs_of(spec).captured.decode_into(stored.captured, record.tokens, out)
            assert np.array_equal(out, sample.hidden_states)
        assert text.captured[1].size == 0
    assert layout.problems(spec, memoryview(content), [(r.offset, r.length) for r in records]) == []


def test_the_text_of_a_long_sample_is_a_small_part_of_it(tmp_path: Path) -> None:
    spec = make_spec(format="tar", hidden_size=64)
    _, records = write_shard(tmp_path / "s.tar", spec, [make_sample(spec, 0, tokens=3000)])
    _, length = TarLayout(b"").text_range(0, (records[0].offset, records[0].length), 3000)
    assert length < records[0].length / 20


def test_unusually_long_metadata_is_said_to_be_cut(tmp_path: Path) -> None:
    spec = make_spec(format="tar")
    _, records = write_shard(tmp_path / "s.tar", spec, [make_sample(spec, 0, metadata={"note": "x" * 100_000})])
    content, layout = (tmp_path / "s.tar").read_bytes(), TarLayout(b"")
    _, length = layout.text_range(0, (0, records[0].length), records[0].tokens)
    with pytest.raises(TextCut, match=r"members json, ids\.npy, mask\.npy are missing"):
        layout.read(0, 0, content[:length], states=False)


def test_every_truncation_and_flip_of_a_range_is_noticed_or_harmless(tmp_path: Path) -> None:
    # The reader's checksum catches all of these; the parser must still never crash or read across members.
    spec = make_spec(format="tar")
    sample = make_sample(spec, 0)
    _, records = write_shard(tmp_path / "s.tar", spec, [sample])
    content, layout = (tmp_path / "s.tar").read_bytes()[: records[0].length], TarLayout(b"")

    def read_all(data: bytes) -> None:
        rows = len(needed(sample))
        stored = layout.read(0, 0, data)
        codecs_of(spec).last.decode_into(stored.last, rows, np.empty((1, rows, spec.hidden_size), np.uint16))

    read_all(content)
    for end in range(0, len(content), 256):
        with pytest.raises(CacheError):
            read_all(content[:end])
    for place in range(0, 512, 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x11
        with pytest.raises(CacheError, match=r"header|not one of its own"):
            layout.read(0, 0, bytes(damaged))


def test_another_frame_or_foreign_member_is_refused(tmp_path: Path) -> None:
    spec = make_spec(format="tar")
    _, records = write_shard(tmp_path / "s.tar", spec, [make_sample(spec, n) for n in range(2)])
    content = (tmp_path / "s.tar").read_bytes()
    with pytest.raises(CacheError, match="not one of its own"):
        TarLayout(b"").read(0, 0, content[: records[1].offset + records[1].length])
    start = content.index(b"\x28\xb5\x2f\xfd")  # zstd's magic number
    damaged = content[:start] + b"\0\0\0\0" + content[start + 4 : records[0].length]
    with pytest.raises(CacheError, match="no zstd frame"):
        TarLayout(b"").read(0, 0, damaged)
    with pytest.raises(CacheError, match="a tar has none"):
        TarLayout(b"footer")


def test_gaps_and_lengths_that_do_not_fit_are_found(tmp_path: Path) -> None:
    spec = make_spec(format="tar")
    _, records = write_shard(tmp_path / "s.tar", spec, [make_sample(spec, n) for n in range(2)])
    content = memoryview((tmp_path / "s.tar").read_bytes())
    ranges = [(record.offset, record.length) for record in records]
    layout = TarLayout(b"")
    assert layout.problems(spec, content, ranges) == []
    assert [kind for kind, _ in layout.problems(spec, content, ranges[:1])] == ["wrong-counts"]
    assert [kind for kind, _ in layout.problems(spec, content, [ranges[1]])] == ["wrong-layout"]
    assert [kind for kind, _ in layout.problems(spec, content[:-1], ranges)] == ["wrong-counts"]
    assert "no zeros" in layout.problems(spec, memoryview(bytes(content[:-1]) + b"x"), ranges)[0][1]
    other = make_spec(format="tar", layer_ids=(0, 1), last_hidden="all")
    assert "layer_ids, last_hidden differ" in layout.problems(other, content, ranges)[0][1]


def test_plane_beyond_ustar_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(format="tar")
    monkeypatch.setattr(tar_shard, "MAX_MEMBER_BYTES", 1000)
    writer = TarShardWriter(tmp_path / "s.tar", spec, codecs_of(spec))
    writer.add(make_sample(spec, 0, tokens=20))
    with pytest.raises(SampleRejected, match="end at 8 GiB"):
        writer.add(make_sample(spec, 1, tokens=32))
    assert len(writer.finish()[3]) == 1
