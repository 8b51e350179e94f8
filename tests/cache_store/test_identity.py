from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import CacheError, CacheMismatch
from cache_store.identity import differences, digest_tokenizer, digest_weights, fingerprint
from cache_store.schema import CacheSpec
from cache_store.storage import open_storage
from cache_store.writer import create_cache, load_spec
from tests.cache_store.samples import IDENTITY, make_spec

OTHER: dict[str, Any] = {
    "layer_ids": (0, 1),
    "hidden_size": 32,
    "num_target_layers": 6,
    "vocab_size": 101,
    "format": "tar",
    "codec": "raw",
    "last_codec": "raw",
    "format_version": 1,
    "last_hidden": "all",
    "shard_bytes": 5,
}
CHANGES = [(name, {name: value}) for name, value in OTHER.items()]
CHANGES += [(f"identity.{name}", {"identity": {**IDENTITY, name: "changed"}}) for name in IDENTITY]
CHANGES += [("identity.new", {"identity": {**IDENTITY, "new": None}})]
CHANGES += [("identity.seed", {"identity": {k: v for k, v in IDENTITY.items() if k != "seed"}})]
CHANGES += [("identity.seed", {"identity": {**IDENTITY, "seed": True}})]  # True == 1 in Python, not in a file


def test_every_field_has_a_case() -> None:
    assert {field.name for field in fields(CacheSpec)} - {"identity"} == set(OTHER)


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_second_build_with_another_setting_is_refused_and_named(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    first = make_spec()
    second = replace(first, **change)
    storage = open_storage(str(tmp_path / "cache"))
    create_cache(storage, first)
    with pytest.raises(CacheMismatch, match="was made with other settings") as caught:
        create_cache(storage, second)
    assert f"{name}: cache has " in str(caught.value)
    assert [item[0] for item in differences(first, second)] == [name]
    assert fingerprint(first) != fingerprint(second)
    assert load_spec(storage) == first


def test_same_settings_are_accepted_whatever_their_order(tmp_path: Path) -> None:
    first = make_spec()
    second = make_spec(identity=dict(reversed(IDENTITY.items())))
    storage = open_storage(str(tmp_path / "cache"))
    create_cache(storage, first)
    assert create_cache(storage, second) == first
    assert fingerprint(first) == fingerprint(second)


def test_weight_digest_follows_contents_and_names(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    (tmp_path / "README").write_text("not a weight")
    first = digest_weights(tmp_path)
    (tmp_path / "README").write_text("changed")
    assert digest_weights(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"two")
    second = digest_weights(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert len({first, second, digest_weights(tmp_path)}) == 3


def test_tokenizer_digest_sees_the_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("a")
    first = digest_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("b")
    assert digest_tokenizer(tmp_path) != first


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no file matches"):
        digest_weights(tmp_path)
