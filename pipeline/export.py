"""Export as a job: a checkpoint or an exported drafter in, a folder that engines load out, every part of it checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache_store.estimate import size_text
from model.errors import ModelError
from model.export import CONFIG, check_copies, export_tensors, load_drafter, read_tensors, save_drafter
from model.family import AnyDrafter
from model.layouts import config_json, layout_of
from model.serving import Engine, ServingWarning, flag_readers, serve_commands, serving_warnings, tensor_readers
from model.target_families import HeadFacts
from model.target_heads import TargetHeads, load_target_heads, read_facts
from pipeline.config import Config
from pipeline.drafter_check import TEMPERATURES_KEY, check_drafter
from pipeline.errors import ConfigError, ExportFailed
from pipeline.identity import CheckedTarget, check_target
from pipeline.train.checkpoint import check_recipe, complete_checkpoints, read_state
from pipeline.train.recipe import prepare_job
from pipeline.train.worker import DRAFTER, drafter_of

_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What the command line says."""

    output: Path | None = None
    """null: `<training.output>/export`."""
    checkpoint: Path | None = None
    """A training checkpoint, or a folder with an exported or released drafter; null: the newest of the run."""
    self_contained: bool = False
    """Add the target's embedding and lm_head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was (or with a dry run would be) written, and what engines do with it."""

    source: Path
    folder: Path
    written: bool
    layout: str
    tensors: tuple[tuple[str, str], ...]
    """(what, who reads it), layers taken together."""
    num_bytes: int
    flags: tuple[tuple[str, Any, str], ...]
    """(key, value, who reads it)."""
    copies: tuple[str, ...]
    """Tensors that equal the target's bit for bit."""
    notes: tuple[str, ...]
    """Differences between the drafter's target and the one at hand that are not fatal."""
    warnings: tuple[ServingWarning, ...]
    commands: Mapping[Engine, str]

    def lines(self) -> list[str]:
        """What the job prints."""
        verb = "Exported" if self.written else "Would export"
        copies = ", ".join(self.copies) or "none: engines take the target's own"
        return [
            f"{verb} {self.source} in the {self.layout} layout to {self.folder}: {size_text(self.num_bytes)}",
            "",
            *_columns(("tensor", "read by"), self.tensors),
            "",
            *_columns(
                ("config.json", "read by"), [(f"{key} = {_short(value)}", who) for key, value, who in self.flags]
            ),
            "",
            f"copies of the target's matrices: {copies}",
            *(f"note     {note}" for note in self.notes),
            *(f"warning  {warning.line()}" for warning in self.warnings),
            "",
            "Serve it:",
            *(f"  {command}" for engine, command in self.commands.items() if not self._blocked(engine)),
            *(f"  ({engine} cannot: see above)" for engine in self.commands if self._blocked(engine)),
        ]

    def _blocked(self, engine: Engine) -> bool:
        return any(warning.blocks and warning.engine == engine for warning in self.warnings)


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    drafter: AnyDrafter
    provenance: dict[str, Any]
    keep: dict[str, Any]
    notes: tuple[str, ...]


def run_export(config: Config, options: ExportOptions, *, dry_run: bool = False) -> ExportReport:
    """Export the run's drafter, read it back, and compare it with what went in and with the target.

    Raises ConfigError when there is nothing to export or it fits another target, ExportFailed when a weight is not
    finite or what was written differs, and the ModelErrors of an unreadable checkpoint.
    """
    target = check_target(config)
    source = _read_source(config, options, target)
    _check_finite(source)
    drafter = source.drafter
    heads = load_target_heads(target.folder, dtype=None, draft_ids=drafter.draft_ids)
    facts = read_facts(target.folder)
    folder = options.output or Path(config.training.output) / "export"
    tensors = export_tensors(drafter, heads=heads, self_contained=options.self_contained)
    copies: list[str] = []
    if not dry_run:
        save_drafter(
            folder,
            drafter,
            source.provenance,
            heads=heads,
            self_contained=options.self_contained,
            keep=source.keep,
        )
        copies = _check_written(folder, tensors, drafter, heads)
    return _report(source, folder, tensors, facts, _Rest(config, dry_run, tuple(copies)))


@dataclass(frozen=True, slots=True)
class _Rest:
    """What else a report says."""

    config: Config
    dry_run: bool
    copies: tuple[str, ...]


def _report(
    source: _Source, folder: Path, tensors: Mapping[str, Tensor], facts: HeadFacts, rest: _Rest
) -> ExportReport:
    drafter = source.drafter
    flags = {**config_json(drafter.config, dtype=drafter.dtype), **source.keep}
    return ExportReport(
        source=source.path,
        folder=folder,
        written=not rest.dry_run,
        layout=layout_of(drafter.config),
        tensors=tuple(_tensor_rows(tensors, drafter)),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        flags=tuple((key, value, flag_readers(key)) for key, value in flags.items()),
        copies=rest.copies,
        notes=source.notes,
        warnings=tuple(
            serving_warnings(
                drafter.config,
                target_family=facts.model_type,
                scales_embedding=facts.embedding_scale is not None,
            )
        ),
        commands=serve_commands(drafter.config, target=rest.config.target.path, drafter=str(folder)),
    )


def _read_source(config: Config, options: ExportOptions, target: CheckedTarget) -> _Source:
    run = Path(config.training.output)
    path = options.checkpoint or next(iter(complete_checkpoints(run / "checkpoints", lambda line: None)), run / DRAFTER)
    if (path / "state.json").is_file():
        job = prepare_job(config)
        state = read_state(path)
        check_recipe(state.recipe, job.recipe, path)
        kept = _temperatures(run / DRAFTER, state.step)
        return _Source(path, drafter_of(job, path), {**job.provenance, "step": state.step}, kept, ())
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path}: holds neither a training checkpoint (state.json) nor a drafter (config.json); train first, or "
            "name one with --checkpoint"
        )
    checked = check_drafter(path, config, target)
    drafter = load_drafter(path)
    data = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    kept = {key: data[key] for key in (TEMPERATURES_KEY,) if key in data}
    provenance = data.get("provenance") or {"imported_from": path.name}
    return _Source(path, drafter, provenance, kept, checked.warnings)


def _temperatures(exported: Path, step: int) -> dict[str, Any]:
    """The calibration of the run's exported drafter, when that is the same step."""
    try:
        data = json.loads((exported / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = (data.get("provenance") or {}).get("step") == step
    return {TEMPERATURES_KEY: data[TEMPERATURES_KEY]} if same and TEMPERATURES_KEY in data else {}


def _check_finite(source: _Source) -> None:
    broken = [name for name, value in source.drafter.state_dict().items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ExportFailed(
            f"{source.path}: {len(broken)} tensors hold infinite or NaN values, the first {broken[0]}; export an "
            "earlier checkpoint with --checkpoint"
        )


def _check_written(folder: Path, tensors: Mapping[str, Tensor], drafter: AnyDrafter, heads: TargetHeads) -> list[str]:
    """Read the export back: same tensors, same configuration, the target's matrices bit for bit."""
    try:
        loaded, stored, copies = load_drafter(folder), read_tensors(folder), check_copies(folder, heads)
    except ModelError as error:
        raise ExportFailed(f"{folder}: what was written does not load again: {error}") from error
    different = [name for name, tensor in tensors.items() if not torch.equal(stored[name], tensor)]
    if loaded.config != drafter.config:
        different.append(CONFIG)
    if different:
        raise ExportFailed(f"{folder}: {', '.join(different)} came back different; is the disk sound?")
    return copies


def _tensor_rows(tensors: Mapping[str, Tensor], drafter: AnyDrafter) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(_LAYER.sub("layers.*.", name), []).append(name)
    for pattern, names in groups.items():
        tensor = tensors[names[0]]
        dtype = str(tensor.dtype).removeprefix("torch.")
        times = f"{len(names)} x " if "*" in pattern else ""
        yield f"{pattern}  {times}{list(tensor.shape)} {dtype}", tensor_readers(names[0], drafter.config)


def _columns(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(row[0]) for row in (head, *rows))
    return [f"{left:<{width}}  {right}" for left, right in (head, *rows)]


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 1 and len(set(map(str, value))) == 1:
        return f"[{value[0]}, ...] x {len(value)}"
    if isinstance(value, list) and value and all(isinstance(item, float) for item in value):
        return f"[{', '.join(f'{item:.4g}' for item in value)}]"
    return json.dumps(value)
