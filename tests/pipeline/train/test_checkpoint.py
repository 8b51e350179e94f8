from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError, TrainingFailed
from pipeline.train import checkpoint
from pipeline.train.checkpoint import (
    CheckpointState,
    ParameterState,
    check_recipe,
    complete_checkpoints,
    read_parameters,
    read_state,
    save_checkpoint,
)

RECIPE = {"training.lr": 6e-4, "drafter.block_size": 7, "cache.fingerprint": "aa"}


def save(folder: Path, step: int, keep: int = 9) -> Path:
    state = CheckpointState(step=step, adam_step=step - 1, skipped=1, world_size=2, recipe=RECIPE, unchanged=["norm"])
    generator = torch.Generator().manual_seed(step)
    parameters = {
        name: ParameterState(*(torch.randn(shape, generator=generator) for _ in range(3)))
        for name, shape in (("a.weight", (3, 4)), ("b", (5,)))
    }
    return save_checkpoint(folder, state, parameters, keep=keep)


def quiet(line: str) -> None:
    raise AssertionError(f"nothing was half-written, yet: {line}")


def test_round_trip_is_exact_and_holds_no_pickle(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    assert path.name == "step-00000012"
    state, parameters = read_state(path), read_parameters(path)
    assert (state.step, state.adam_step, state.skipped, state.recipe) == (12, 11, 1, RECIPE)
    generator = torch.Generator().manual_seed(12)
    for name, shape in (("a.weight", (3, 4)), ("b", (5,))):
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(parameters[name], key), torch.randn(shape, generator=generator))
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert (tmp_path / "latest").read_text() == "step-00000012\n"


@pytest.mark.parametrize("file", ["master.safetensors", "exp_avg_sq.safetensors", "state.json"])
@pytest.mark.parametrize("kept_bytes", [0, 7, -1])
def test_half_written_checkpoint_is_ignored_aloud(tmp_path: Path, file: str, kept_bytes: int) -> None:
    good, bad = save(tmp_path, 3), save(tmp_path, 6)
    content = (bad / file).read_bytes()
    (bad / file).write_bytes(content[:kept_bytes])
    if file == "state.json" and kept_bytes == -1:
        (bad / file).write_bytes(content[: len(content) // 2])
    said: list[str] = []
    assert complete_checkpoints(tmp_path, said.append) == [good]
    assert len(said) == 1
    assert str(bad) in said[0]


@pytest.mark.parametrize("files", [None, [], {}, {"master.safetensors": 1}])
def test_a_state_that_names_no_files_is_half_written(tmp_path: Path, files: object) -> None:
    good, bad = save(tmp_path, 3), save(tmp_path, 6)
    content = json.loads((bad / "state.json").read_text())
    (bad / "state.json").write_text(json.dumps({**content, "files": files}))
    said: list[str] = []
    assert complete_checkpoints(tmp_path, said.append) == [good]
    assert "has no readable state.json" in said[0]


def test_killed_before_the_rename_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 3)

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    # `latest` is written last: dying there leaves a complete checkpoint that `latest` does not name yet.
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 6)
    assert (tmp_path / "latest").read_text().strip() == good.name
    assert [path.name for path in complete_checkpoints(tmp_path, quiet)] == ["step-00000006", "step-00000003"]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", lambda tensors, path: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 9)
    said: list[str] = []
    assert complete_checkpoints(tmp_path, said.append)[0].name == "step-00000006"
    assert "step-00000009.tmp" in said[0]
    save(tmp_path, 9)  # the next try clears the leftovers
    assert complete_checkpoints(tmp_path, quiet)[0].name == "step-00000009"


def test_oldest_are_removed_beyond_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [path.name for path in complete_checkpoints(tmp_path, quiet)] == ["step-00000004", "step-00000003"]


def test_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 3)

    def full(tensors: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainingFailed, match=r"step-00000006.*No space left"):
        save(tmp_path, 6)
    assert complete_checkpoints(tmp_path, lambda line: None) == [good]


def test_other_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format_version": 99}))
    with pytest.raises(TrainingFailed, match="format 99"):
        read_state(path)


def test_another_step_in_the_state_is_never_trained_on(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    state = (path / "state.json").read_text()
    (path / "state.json").write_text(state.replace('"step": 3', '"step": 7'))
    with pytest.raises(TrainingFailed, match=r"step-00000003: state.json changed since it was written"):
        read_state(path)


def test_a_checkpoint_of_another_version_is_refused_and_not_ignored(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    state = json.loads((path / "state.json").read_text())
    old = {**state, "format_version": 1, "files": {name: facts["bytes"] for name, facts in state["files"].items()}}
    (path / "state.json").write_text(json.dumps(old))
    assert complete_checkpoints(tmp_path, quiet) == [path]
    with pytest.raises(TrainingFailed, match="it was written by another version"):
        read_state(path)


@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_is_named_and_never_trained_on(tmp_path: Path, place: int) -> None:
    path = save(tmp_path, 3)
    content = bytearray((path / "exp_avg.safetensors").read_bytes())
    content[place] ^= 1
    (path / "exp_avg.safetensors").write_bytes(content)
    assert complete_checkpoints(tmp_path, quiet) == [path], "its size is right"
    with pytest.raises(TrainingFailed, match=r"step-00000003: exp_avg.safetensors changed since it was written"):
        read_parameters(path)


@pytest.mark.parametrize("name", sorted(RECIPE))
def test_changed_recipe_is_refused_naming_the_field(name: str, tmp_path: Path) -> None:
    check_recipe(RECIPE, dict(RECIPE), tmp_path)
    with pytest.raises(ConfigError, match=rf"{name} was .* now 'other'"):
        check_recipe(RECIPE, {**RECIPE, name: "other"}, tmp_path)
    without = {key: value for key, value in RECIPE.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} was '<absent>'"):
        check_recipe(without, RECIPE, tmp_path)
    with pytest.raises(ConfigError, match=rf"{name} was .* now '<absent>'"):
        check_recipe(RECIPE, without, tmp_path)


def test_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    assert complete_checkpoints(tmp_path, quiet) == []
