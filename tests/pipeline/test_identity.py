from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.identity import differences, fingerprint
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.identity import check_length, check_target, make_spec


@pytest.fixture
def spec_of(make_config: Callable[..., Config]) -> Callable[..., object]:
    def make(prompts: str = "0" * 64, **sections: object) -> object:
        config = make_config(**sections)
        return make_spec(config, check_target(config), prompts)

    return make


def test_speed_settings_and_the_folders_name_are_no_identity(
    spec_of: Callable[..., object], tiny_target: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(tiny_target, moved)
    faster = spec_of(
        target={"path": str(moved)},
        generation={"batch_size": 9, "num_engines": 3, "engine_kwargs": {"max_num_seqs": 7}},
        extraction={"tokens_per_batch": 99},
    )
    assert fingerprint(faster) == fingerprint(spec_of())  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"])
def test_every_file_of_the_target_is_identity(
    spec_of: Callable[..., object], tiny_target: Path, tmp_path: Path, file: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(tiny_target, changed)
    content = (changed / file).read_bytes()
    edited = content.replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05') if file == "config.json" else content
    if file == "model.safetensors":
        edited = content[:-1] + bytes([content[-1] ^ 1])
    elif file != "config.json":
        edited = content + b" "
    assert edited != content
    (changed / file).write_bytes(edited)
    found = differences(spec_of(), spec_of(target={"path": str(changed)}))  # type: ignore[arg-type]
    names = {name for name, _, _ in found}
    wanted = {
        "model.safetensors": "identity.weights",
        "tokenizer.json": "identity.tokenizer",
        "chat_template.jinja": "identity.chat_template",
        "config.json": "identity.config",
    }[file]
    assert wanted in names


def test_the_identity_names_what_a_reader_must_know(spec_of: Callable[..., object]) -> None:
    identity = spec_of().identity  # type: ignore[attr-defined]
    for field in (
        "norm",
        "dtype",
        "quantization",
        "chat_template",
        "temperature",
        "seed",
        "engine",
        "history",
        "weights",
    ):
        assert field in identity
    assert "after the final norm" in identity["norm"]


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        ({"max_position_embeddings": 96}, False),
        ({"max_position_embeddings": 95}, True),
        ({"max_position_embeddings": 95, "rope_parameters": {"rope_type": "default"}}, True),
        ({"max_position_embeddings": 48, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, False),
        ({"max_position_embeddings": 48, "rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({}, False),
    ],
)
def test_rows_longer_than_the_target_reads_are_refused(facts: dict[str, object], refused: bool) -> None:
    if not refused:
        check_length(96, facts)
        return
    with pytest.raises(ConfigError, match="max_length 96 is beyond the target's max_position_embeddings 95"):
        check_length(96, facts)


def test_a_target_of_an_unknown_family_is_refused_before_anything_is_built(
    make_config: Callable[..., Config], tiny_target: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "phi3"}))
    with pytest.raises(
        ConfigError, match=r"config.json: model_type 'phi3' is not a supported target family; supported"
    ):
        check_target(make_config(target={"path": str(copy)}))
