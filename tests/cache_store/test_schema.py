from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheError
from cache_store.identity import fingerprint
from cache_store.schema import CacheSpec
from tests.cache_store.samples import make_spec

JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(
    identity=st.dictionaries(st.text(), JSON_VALUES, max_size=5),
    layers=st.sets(st.integers(-1, 20), min_size=1),
    codec=st.sampled_from(["bss1", "raw"]),
)
def test_json_round_trip(identity: dict[str, Any], layers: set[int], codec: str) -> None:
    spec = make_spec(identity=identity, layer_ids=tuple(sorted(layers)), num_target_layers=22, codec=codec)
    assert CacheSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": ()}, "layer_ids"),
        ({"layer_ids": (2, 1)}, "ascending"),
        ({"layer_ids": (1, 1)}, "without repeats"),
        ({"layer_ids": (0, 4)}, "within -1..3"),
        ({"layer_ids": (-2, 1)}, "within -1..3"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"format": "zip"}, "format is 'zip', wanted one of parquet, tar"),
        ({"codec": "zip"}, "codec is 'zip', wanted one of bss1, raw"),
        ({"last_codec": "f8r"}, "last_codec is 'f8r', wanted one of bss1, raw, i8cr"),
        ({"codec": "f8r", "hidden_size": 65536}, "hidden_size is 65536, codec f8r"),
        ({"format_version": 3}, "format_version is 3, wanted one of 1, 2"),
        ({"format_version": 1, "format": "tar"}, "format_version 1 has only"),
        ({"format_version": 1, "codec": "raw", "last_codec": "bss1"}, "format_version 1 has only"),
        ({"last_hidden": "some"}, "last_hidden is 'some'"),
        ({"identity": {"x": object()}}, r"identity\.x is not JSON"),
        ({"identity": []}, "identity is list"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        make_spec(**changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.pop("codec"), r"missing fields \['codec'\]"),
        (lambda data: data.update(colour=1), r"unknown fields \['colour'\]"),
        (lambda data: data.update(format_version=3), "format_version 3, this program reads 1 and 2"),
        (lambda data: data.update(layer_ids="02"), "wanted a list"),
    ],
)
def test_other_documents_are_refused(edit: Any, message: str) -> None:
    data = json.loads(make_spec().to_json())
    edit(data)
    with pytest.raises(CacheError, match=message):
        CacheSpec.from_json(json.dumps(data))


def test_version_1_is_still_read_and_keeps_its_fingerprint() -> None:
    # Written by hand from version 1's FORMAT.md: no last_codec. The digest is of exactly these fields.
    data = {"layer_ids": [0, 2], "hidden_size": 16, "num_target_layers": 5, "vocab_size": 100, "format": "parquet"}
    data |= {"codec": "raw", "last_hidden": "all", "shard_bytes": 7, "identity": {"target": "toy"}}
    spec = CacheSpec.from_json(json.dumps({"format_version": 1, **data}))
    assert (spec.format_version, spec.last_codec) == (1, "raw")
    assert CacheSpec.from_json(spec.to_json()) == spec
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert fingerprint(spec) == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(("codec", "last"), [("bss1", "bss1"), ("raw", "raw"), ("i8cr", "bss1"), ("f8r", "bss1")])
def test_the_last_hidden_state_stays_exact_unless_asked(codec: str, last: str) -> None:
    assert make_spec(codec=codec).last_codec == last
    assert make_spec(codec=codec, last_codec="i8cr").last_codec == "i8cr"


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_broken_json_is_refused(text: str) -> None:
    with pytest.raises(CacheError, match=r"cache\.json"):
        CacheSpec.from_json(text)
