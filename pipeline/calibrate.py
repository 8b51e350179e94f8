"""Calibration as a job: an evaluation's rounds in; temperatures, their proof and the drafter's config.json out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cache_store.identity import digest_weights
from model.decoding.calibration import (
    Calibration,
    Rounds,
    fit_shared_temperature,
    fit_temperatures,
    measure_positions,
)
from model.export import CONFIG, has_copies, load_drafter, read_config, save_drafter
from model.family import AnyDrafter
from model.target_heads import load_target_heads
from pipeline.acceptance import TRAINED, RoundRow
from pipeline.atomic_file import write_atomically
from pipeline.config import Config, TargetSection
from pipeline.drafter_check import TEMPERATURES_KEY
from pipeline.engines.hf import resolve_target
from pipeline.errors import ConfigError
from pipeline.html_report import CALIBRATION, REPORT_JSON, output_folder, read_report, write_html
from pipeline.report import DRAFTER_WEIGHTS
from pipeline.report_tables import calibration_table
from pipeline.report_text import print_table, print_warnings, wide_console
from pipeline.rounds_table import read_rounds
from pipeline.train.worker import DRAFTER


@dataclass(frozen=True, slots=True)
class Split:
    """Rounds to fit on and rounds to check on; the same when there are too few prompts to split."""

    fit: list[RoundRow]
    check: list[RoundRow]


def run_calibration(config: Config, *, dry_run: bool = False, console: Console | None = None) -> Calibration | None:
    """Fit, save calibration.json beside the rounds, export the temperatures, and show what changed.

    Raises ConfigError without usable rounds or drafter.
    """
    console = console or wide_console()
    folder = evaluation_folder(config)
    drafter = Path(config.training.output) / DRAFTER
    rows = _usable_rounds(config, folder)
    split = split_rounds(rows, config.calibration.check_fraction)
    console.print(
        f"calibrate: {len(split.fit):,} rounds of {_prompts(split.fit)} prompts to fit, {len(split.check):,} rounds of "
        f"{_prompts(split.check)} prompts to check, drafter {drafter}",
        highlight=False,
        markup=False,
    )
    warnings = [*_check_drafter(folder, drafter, rows), *find_weaknesses(config, split)]
    if dry_run:
        print_warnings(warnings, console)
        return None
    calibration = calibrate(split, _facts(config, split, drafter, warnings))
    write_atomically(folder / CALIBRATION, calibration.to_json())
    if config.calibration.write_config:
        write_temperatures(drafter, calibration)
    if config.calibration.folded is not None:
        temperature = fit_shared_temperature(to_rounds(split.fit))
        fold_drafter(drafter, Path(config.calibration.folded), temperature, target=config.target)
    report = write_html(config, folder)
    print_table(calibration_table(calibration), console)
    print_warnings(warnings, console)
    written = [str(folder / CALIBRATION), *([str(report)] if report else [])]
    written += [f"{drafter / CONFIG} (key {TEMPERATURES_KEY})"] if config.calibration.write_config else []
    written += [config.calibration.folded] if config.calibration.folded else []
    console.print(f"written: {', '.join(written)}", highlight=False, markup=False)
    return calibration


def evaluation_folder(config: Config) -> Path:
    """Where the rounds are, and the calibration goes."""
    return Path(config.calibration.rounds) if config.calibration.rounds else output_folder(config)


def calibrate(split: Split, facts: dict[str, Any]) -> Calibration:
    """Fit on one part of the rounds, measure before and after on the other."""
    check = to_rounds(split.check)
    temperatures = fit_temperatures(to_rounds(split.fit))
    return Calibration(
        temperatures=temperatures,
        fitted_on=facts,
        before=measure_positions(check),
        after=measure_positions(check, temperatures),
    )


def split_rounds(rows: Sequence[RoundRow], check_fraction: float) -> Split:
    """Split by prompt, by a hash of its id: rounds of one prompt are too alike to check each other."""
    ids = sorted({row.prompt_id for row in rows}, key=lambda name: hashlib.sha256(name.encode("utf-8")).digest())
    checked = set(ids[: round(len(ids) * check_fraction)])
    fit = [row for row in rows if row.prompt_id not in checked]
    check = [row for row in rows if row.prompt_id in checked]
    return Split(fit, check) if fit and check else Split(list(rows), list(rows))


def to_rounds(rows: Sequence[RoundRow]) -> Rounds:
    """The table's rows as calibration reads them."""
    return Rounds.from_counts(
        [row.confidences for row in rows], [row.accepted for row in rows], [row.proposed for row in rows]
    )


def _usable_rounds(config: Config, folder: Path) -> list[RoundRow]:
    wanted = config.calibration.temperatures
    rows = [row for row in read_rounds(folder) if row.drafter == TRAINED]
    chosen = [row for row in rows if not wanted or any(abs(row.temperature - t) < 1e-6 for t in wanted)]
    usable = [row for row in chosen if row.confidences]
    if not usable:
        found = sorted({row.temperature for row in rows})
        raise ConfigError(
            f"{folder}: {len(chosen)} of {len(rows)} rounds have a temperature of calibration.temperatures "
            f"{list(wanted)} (found: {found}), and none of them confidences; evaluate a drafter with a confidence head"
        )
    return usable


def _check_drafter(folder: Path, drafter: Path, rows: Sequence[RoundRow]) -> list[str]:
    """Refuse rounds of another drafter than the one at hand; what cannot be compared is warned about."""
    if not (drafter / CONFIG).is_file():
        raise ConfigError(f"{drafter}: no exported drafter there; calibration belongs to the one that was evaluated")
    found, block = sorted({len(row.confidences) for row in rows}), read_config(drafter).block_size
    if found != [block]:
        raise ConfigError(
            f"{folder}: rounds of {found} confidences, {drafter} drafts {block}; run jobs/evaluate_drafter.py again"
        )
    report = folder / REPORT_JSON
    evaluated = read_report(report).settings.get(DRAFTER_WEIGHTS) if report.is_file() else None
    if evaluated is None:
        return [f"{folder} does not say which drafter its rounds are of: they were not compared with {drafter}"]
    if evaluated != digest_weights(drafter):
        raise ConfigError(
            f"{folder}: the rounds are another drafter's: its weights were {evaluated[:12]}…, those of {drafter} are "
            f"{digest_weights(drafter)[:12]}…; run jobs/evaluate_drafter.py again"
        )
    return []


def find_weaknesses(config: Config, split: Split) -> list[str]:
    """What makes the result less trustworthy."""
    warnings = []
    if len(split.fit) < config.calibration.min_rounds:
        warnings.append(
            f"fitted on {len(split.fit)} rounds, fewer than calibration.min_rounds {config.calibration.min_rounds}: "
            "evaluate more prompts before trusting the temperatures"
        )
    if split.fit == split.check:
        warnings.append("too few prompts to keep any out of the fit: 'after' is measured on the rounds of the fit")
    held_back = sum(row.proposed < len(row.confidences) and row.accepted == row.proposed for row in split.fit)
    if held_back > 0.2 * len(split.fit):
        warnings.append(
            f"{100 * held_back / len(split.fit):.0f} % of the rounds were cut before their block ended (a threshold or "
            "stop tokens), so later positions saw few rounds; evaluate with evaluation.confidence_threshold=0"
        )
    return warnings


def _facts(config: Config, split: Split, drafter: Path, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "name": config.name,
        DRAFTER_WEIGHTS: digest_weights(drafter),
        "temperatures": sorted({row.temperature for row in split.fit}),
        "rounds": len(split.fit),
        "prompts": _prompts(split.fit),
        "checked_rounds": len(split.check),
        "checked_prompts": _prompts(split.check),
        "shared_temperature": fit_shared_temperature(to_rounds(split.fit)),
        "warnings": list(warnings),
    }


def _prompts(rows: Sequence[RoundRow]) -> int:
    return len({row.prompt_id for row in rows})


def write_temperatures(drafter: Path, calibration: Calibration) -> None:
    """Put the temperatures into the drafter's config.json, every other key as it was."""
    file = drafter / CONFIG
    data = json.loads(file.read_text(encoding="utf-8"))
    data[TEMPERATURES_KEY] = list(calibration.temperatures)
    write_atomically(file, json.dumps(data, indent=2) + "\n")


def fold_drafter(source: Path, destination: Path, temperature: float, *, target: TargetSection) -> None:
    """A copy of the drafter whose confidence logits are divided by `temperature`, in the weights themselves.

    The target is read only when the drafter carries copies of its matrices.
    Raises ConfigError for a drafter without a confidence head.
    """
    drafter: AnyDrafter = load_drafter(source)
    head = getattr(drafter, "confidence_head", None)
    if head is None:
        raise ConfigError(f"{source}: has no confidence head to fold a temperature into")
    with torch.no_grad():
        for parameter in head.proj.parameters():
            parameter.div_(temperature)
    provenance = json.loads((source / CONFIG).read_text(encoding="utf-8")).get("provenance") or {}
    heads = None
    if has_copies(source):
        heads = load_target_heads(resolve_target(target), dtype=None, draft_ids=drafter.draft_ids)
    save_drafter(destination, drafter, provenance | {"confidence_folded_temperature": temperature}, heads=heads)
