"""Checkpoints without pickle and without ranks: full float32 tensors by parameter name, and a small JSON file.

Layout: `<folder>/step-00000120/{master,exp_avg,exp_avg_sq}.safetensors` and `state.json`, written to
`step-00000120.tmp`, synced, renamed; then `<folder>/latest` names it, for people. A folder counts only when its
state.json and every file in the size that state.json says are there: a half-written one is ignored, aloud. The files'
checksums are compared when they are read.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_store.backend import sync
from pipeline.atomic_file import TEMPORARY, write_atomically
from pipeline.errors import ConfigError, TrainingFailed

FORMAT_VERSION = 2
_PIECE = 2**24
TENSORS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """state.json: everything about a moment of training that is not a tensor."""

    step: int
    """Optimizer steps done: where the order of samples continues."""
    adam_step: int
    """Updates made; smaller than `step` by the skipped ones."""
    skipped: int
    """Steps without any supervised slot."""
    world_size: int
    """Of the run that wrote it; any other may continue."""
    recipe: dict[str, Any]
    """Flat JSON: what must not change within a run."""
    unchanged: list[str]
    """Trainable tensors that still equal their initial value."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """One parameter's float32 master and Adam moments, all of the parameter's shape."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def to_cpu(self) -> ParameterState:
        """A copy on the CPU that shares no memory with the optimizer's."""
        return ParameterState(*(getattr(self, name).detach().to("cpu", copy=True).contiguous() for name in TENSORS))


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return folder / f"step-{step:08d}"


def save_checkpoint(
    folder: Path, state: CheckpointState, parameters: Mapping[str, ParameterState], *, keep: int
) -> Path:
    """Write a checkpoint so that it is either complete or absent, and remove the oldest beyond `keep`.

    `parameters` are float32 on the CPU, by name.
    Raises TrainingFailed when the disk refuses it; earlier checkpoints stay.
    """
    final = step_folder(folder, state.step)
    temporary = final.with_name(final.name + TEMPORARY)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob(f"step-*{TEMPORARY}"), final):
            if stale.exists():
                shutil.rmtree(stale)
        temporary.mkdir()
        for name in TENSORS:
            tensors = {key: getattr(value, name) for key, value in parameters.items()}
            save_file(tensors, temporary / f"{name}.safetensors")
        files = {path.name: _facts(path) for path in sorted(temporary.glob("*.safetensors"))}
        content = {"format_version": FORMAT_VERSION, **asdict(state), "files": files}
        content["crc32"] = _own_checksum(content)
        (temporary / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(final)
        sync(folder)
        write_atomically(folder / "latest", final.name + "\n")
    except (OSError, SafetensorError) as error:
        raise TrainingFailed(
            f"{final}: cannot write the checkpoint: {error}; free space or fix the folder and run the same command"
        ) from error
    for old in complete_checkpoints(folder, lambda line: None)[keep:]:
        shutil.rmtree(old)
    return final


def complete_checkpoints(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Complete checkpoints, newest first; whatever is not complete is named through `say`."""
    found = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        problem = "was being written" if path.name.endswith(TEMPORARY) else _problem(path)
        if problem:
            say(f"ignored the half-written checkpoint {path}: it {problem}")
        else:
            found.append(path)
    return found


def read_state(path: Path) -> CheckpointState:
    """state.json of a complete checkpoint. Raises TrainingFailed for another format, unknown fields, or damage."""
    content = json.loads((path / "state.json").read_text(encoding="utf-8"))
    crc = content.pop("crc32", None)
    if content.get("format_version") == FORMAT_VERSION and crc != _own_checksum(content):
        raise TrainingFailed(
            f"{path}: state.json changed since it was written: its checksum differs; delete this folder to continue "
            "from the checkpoint before it"
        )
    version = content.pop("format_version", None)
    content.pop("files", None)
    names = {field.name for field in fields(CheckpointState)}
    if version != FORMAT_VERSION or set(content) != names:
        raise TrainingFailed(
            f"{path}/state.json: format {version} with fields {sorted(content)}, wanted format {FORMAT_VERSION} with "
            f"{sorted(names)}; it was written by another version, train into another training.output"
        )
    return CheckpointState(**content)


def read_parameters(path: Path) -> dict[str, ParameterState]:
    """Masters and moments of a complete checkpoint, by parameter name, float32 on the CPU.

    Raises TrainingFailed when a file cannot be read or is not what was written.
    """
    try:
        files = json.loads((path / "state.json").read_text(encoding="utf-8"))["files"]
        changed = [name for name, facts in files.items() if _facts(path / name) != facts]
        if changed:
            raise TrainingFailed(
                f"{path}: {', '.join(changed)} changed since it was written: its checksum differs; delete this folder "
                "to continue from the checkpoint before it"
            )
        masters, *moments = (load_file(path / f"{name}.safetensors") for name in TENSORS)
    except (OSError, SafetensorError) as error:
        raise TrainingFailed(
            f"{path}: cannot be read: {error}; delete this folder to continue from the checkpoint before it"
        ) from error
    return {name: ParameterState(master, *(moment[name] for moment in moments)) for name, master in masters.items()}


def check_recipe(saved: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue a run under another recipe, cache or drafter.

    Raises ConfigError naming every field that differs, with both values.
    """
    names = [*saved, *(name for name in current if name not in saved)]
    absent = "<absent>"
    pairs = [(name, saved.get(name, absent), current.get(name, absent)) for name in names]
    different = [f"{name} was {old!r}, now {new!r}" for name, old, new in pairs if old != new]
    if different:
        raise ConfigError(
            f"{path} cannot be continued: {'; '.join(different)}; restore the old values, or choose another "
            "training.output"
        )


def unchanged_tensors(initial: Mapping[str, int], parameters: Mapping[str, ParameterState]) -> list[str]:
    """Names whose master still has its initial checksum: weights that do not learn."""
    return [name for name, parameter in parameters.items() if checksum(parameter.master) == initial[name]]


def checksum(tensor: Tensor) -> int:
    """crc32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _facts(file: Path) -> dict[str, int]:
    """Size and crc32 of a file, read in pieces."""
    crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return {"bytes": file.stat().st_size, "crc32": crc}


def _own_checksum(content: Mapping[str, Any]) -> int:
    """crc32 of state.json's content, itself left out."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _problem(path: Path) -> str | None:
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            return None  # whole or not: another version wrote it, and whoever reads it says so
        files = content["files"]
        sizes = {name: files[name]["bytes"] for name in (f"{tensor}.safetensors" for tensor in TENSORS)}
    except (OSError, ValueError, KeyError, TypeError):
        return "has no readable state.json"
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            return f"holds {found} bytes of {name}, wanted {size}"
    return None
