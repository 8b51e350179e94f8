"""Save and load drafters in the layouts of the released checkpoints: config.json + model.safetensors.

vLLM and SGLang load such a folder (serving.py says what each supports). The target's embedding and lm_head are absent
by design: both engines take them from the target, and they are frozen here. Copies are written only where an engine
needs them: the lm_head's rows of a reduced draft vocabulary, the scaled embedding of a Gemma target, or all of it on
demand (`self_contained`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import DrafterConfig
from model.draft_vocab import from_offsets, to_offsets
from model.errors import CheckpointError, DrafterConfigError
from model.family import AnyDrafter, new_drafter
from model.layouts import ZERO_HEAD_RANK, config_from_json, config_json, needs_zero_head
from model.target_heads import TargetHeads

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING, HEAD, MAPPING = "embed_tokens.weight", "lm_head.weight", "d2t"
# Copies of the target's own matrices that a checkpoint may carry; the target's are used instead. t2d is d2t again.
_TARGET_OWNED = frozenset({EMBEDDING, HEAD, "t2d"})
_ZERO_HEAD = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def save_drafter(
    directory: str | Path,
    drafter: AnyDrafter,
    extra: Mapping[str, Any],
    *,
    heads: TargetHeads | None = None,
    self_contained: bool = False,
    keep: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors in the parameters' dtype; returns the folder.

    `extra` (JSON types: provenance, run, step) is stored under the key `provenance`, which no loader reads; `keep` are
    further keys that only this project reads. Both files are renamed into place, the weights first, so a folder with a
    config.json is complete.
    `heads` in their stored dtype are needed for a reduced vocabulary, a scaled embedding and `self_contained`.
    Raises CheckpointError when they are needed and absent.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = export_tensors(drafter, heads=heads, self_contained=self_contained)
    data = {**config_json(drafter.config, dtype=drafter.dtype), **(keep or {}), "provenance": dict(extra)}
    config, weights = folder / f".{CONFIG}.tmp", folder / f".{WEIGHTS}.tmp"
    config.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, weights, metadata={"format": "pt"})
    shutil.copymode(config, weights)  # safetensors writes for its owner alone; servers run as somebody else
    os.replace(weights, folder / WEIGHTS)
    os.replace(config, folder / CONFIG)
    return folder


def export_tensors(
    drafter: AnyDrafter, *, heads: TargetHeads | None = None, self_contained: bool = False
) -> dict[str, Tensor]:
    """What model.safetensors will hold, on the CPU: the drafter's parameters, and copies as save_drafter says."""
    config = drafter.config
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if needs_zero_head(config):
        rows = (config.vocab_size, config.draft_vocab_size)
        tensors |= {
            name: torch.zeros(size, ZERO_HEAD_RANK, dtype=drafter.dtype)
            for name, size in zip(_ZERO_HEAD, rows, strict=True)
        }
    return tensors | _copies(drafter, heads, self_contained)


def _copies(drafter: AnyDrafter, heads: TargetHeads | None, self_contained: bool) -> dict[str, Tensor]:
    reduced = drafter.config.reduces_vocabulary
    if heads is None:
        if reduced or self_contained:
            raise CheckpointError(
                "this export holds copies of the target's matrices (a reduced draft vocabulary, or self-contained): "
                "pass the target's heads"
            )
        return {}
    copies: dict[str, Tensor] = {}
    if reduced:
        ids = drafter.draft_ids
        if ids is None or heads.draft_ids is None or not torch.equal(ids.cpu(), heads.draft_ids.cpu()):
            raise CheckpointError("drafter and target heads hold different draft vocabularies, or one holds none")
        copies[MAPPING] = to_offsets(ids.cpu())
    if self_contained or heads.embedding_scale is not None:
        # No engine scales what a drafter looks up, so it must look up what it was trained on.
        scaled = heads.embedding_scale is not None
        table = heads.embedding_table(drafter.dtype) if scaled else heads.embedding_VD
        copies[EMBEDDING] = table.detach().cpu().clone()
    if self_contained or reduced:
        copies[HEAD] = heads.draft_head_VD.detach().cpu().clone()
    return copies


def load_drafter(directory: str | Path) -> AnyDrafter:
    """Read a drafter in the dtype it was stored in, on the CPU; its `draft_ids` are those of the checkpoint.

    Raises CheckpointError for an unreadable file and for a missing, unknown or misshapen tensor, naming it.
    """
    folder = Path(directory)
    config = read_config(folder)
    tensors = read_tensors(folder)
    try:
        draft_ids = _draft_ids(tensors.pop(MAPPING, None), config)
    except DrafterConfigError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {MAPPING}: {error}") from error
    if needs_zero_head(config):
        _drop_zero_head(tensors, folder / WEIGHTS)
    with torch.device("meta"):
        drafter = new_drafter(config)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _TARGET_OWNED}
    _check_tensors(tensors, drafter, folder / WEIGHTS)
    drafter.load_state_dict(tensors, assign=True)
    drafter.draft_ids = draft_ids
    return drafter.requires_grad_(True)


def read_config(folder: Path) -> DrafterConfig:
    """The drafter's configuration from its config.json alone. Raises CheckpointError."""
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    return config_from_json(data, source=str(path))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, one file or several. Raises CheckpointError."""
    index = folder / f"{WEIGHTS}.index.json"
    names = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            tensors |= load_file(folder / name)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / names[0]}: not readable as safetensors: {error}") from error
    return tensors


def has_copies(folder: Path) -> bool:
    """Whether the checkpoint carries matrices of the target, from its header alone. Raises CheckpointError."""
    if (folder / f"{WEIGHTS}.index.json").exists():
        return True  # no drafter of ours is sharded: a released one, which carries both
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as tensors:
            return bool({EMBEDDING, HEAD} & set(tensors.keys()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: not readable as safetensors: {error}") from error


def check_copies(folder: Path, heads: TargetHeads) -> list[str]:
    """Which copies of the target's matrices a checkpoint carries, each equal to the target's bit for bit.

    `heads`: the target's, in their stored dtype. Raises CheckpointError naming the first that differs: the engines
    would serve with it what was neither trained nor evaluated here.
    """
    tensors = read_tensors(folder)
    config = read_config(folder)
    ids = _draft_ids(tensors.get(MAPPING), config)
    head = heads.lm_head_VD if ids is None else heads.lm_head_VD[ids]
    found = [name for name in (EMBEDDING, HEAD) if name in tensors]
    for name in found:
        stored = tensors[name]
        wanted = head
        if name == EMBEDDING:
            scaled = heads.embedding_scale is not None
            wanted = heads.embedding_table(stored.dtype) if scaled else heads.embedding_VD
        if stored.shape != wanted.shape or not torch.equal(stored.to(wanted.dtype), wanted):
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} {list(stored.shape)} {stored.dtype} is not the target's "
                f"{list(wanted.shape)} {wanted.dtype} bit for bit; the drafter belongs to another target, or its copy "
                "was trained"
            )
    return found


def _draft_ids(d2t: Tensor | None, config: DrafterConfig) -> Tensor | None:
    if (d2t is None) == config.reduces_vocabulary or (d2t is not None and len(d2t) != config.draft_vocab_size):
        found = "no mapping" if d2t is None else f"a mapping of {len(d2t)}"
        raise DrafterConfigError(
            f"found {found} for a draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size}"
        )
    return None if d2t is None else from_offsets(d2t, config.vocab_size)


def _drop_zero_head(tensors: dict[str, Tensor], path: Path) -> None:
    for name in _ZERO_HEAD:
        if name not in tensors or bool(tensors[name].any()):
            raise CheckpointError(f"{path}: {name} is missing or not zero, yet config.json says zero_markov_head")
        del tensors[name]


def _check_tensors(tensors: Mapping[str, Tensor], drafter: AnyDrafter, path: Path) -> None:
    expected = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {found[name]}, wanted {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        problems.append(f"tensors of different dtypes {sorted({str(t.dtype) for t in tensors.values()})}")
    if problems:
        raise CheckpointError(f"{path}: does not fit its config.json: {'; '.join(problems)}")
