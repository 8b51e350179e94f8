"""An evaluation's rounds.parquet as the trace that a serving simulation replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.decoding.trace import Trace
from pipeline.acceptance import TRAINED
from pipeline.errors import ConfigError

_COLUMNS = ("prompt_id", "temperature", "position", "proposed", "accepted", "emitted", "confidences")
_OPTIONAL = ("drafter", "turn")

Calibrate = Callable[[np.ndarray], np.ndarray]
"""Confidences float32 [N,K] in and out."""


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The trace, and what of the table did not enter it."""

    trace: Trace
    rounds: int
    """Of the table, for the temperature and drafter asked for."""
    cut: int
    """Rounds left out because they do not show the whole block's fate: every draft that was verified was accepted, and
    fewer than the block were verified (a threshold, a stop token or a limit ended the round)."""


def read_recorded_trace(
    path: str | Path, *, temperature: float | None = None, calibrate: Calibrate | None = None
) -> RecordedTrace:
    """Read the table's rounds of the trained drafter, one request per answer, in the order of their positions.

    `calibrate` maps confidences before anything else sees them. Raises ConfigError naming the file and what it lacks.
    """
    rows = _rows(path)
    keys = [row for row in rows if row.get("drafter", TRAINED) == TRAINED]
    if temperature is not None:
        keys = [row for row in keys if abs(row["temperature"] - temperature) < 1e-6]
    sizes = {len(row["confidences"]) for row in keys}
    if not keys or sizes != {max(sizes)} or sizes == {0}:
        found = sorted({float(row["temperature"]) for row in rows})
        raise ConfigError(
            f"{path}: {len(keys)} of {len(rows)} rounds fit drafter {TRAINED!r} and temperature {temperature} "
            f"(temperatures in it: {found}), with confidences of lengths {sorted(sizes)}; wanted rounds with one "
            "confidence per draft: evaluate a drafter with a confidence head"
        )
    block = sizes.pop()
    answers: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in keys:
        answers.setdefault((row["prompt_id"], row.get("turn", 0), row["temperature"]), []).append(row)
    whole = {answer: [row for row in found if _whole(row, block)] for answer, found in answers.items()}
    used = {answer: sorted(found, key=lambda row: row["position"]) for answer, found in whole.items() if found}
    if not used:
        raise ConfigError(f"{path}: no round shows its whole block's fate; evaluate without a confidence threshold")
    flat = [row for found in used.values() for row in found]
    confidences = np.array([row["confidences"] for row in flat], dtype=np.float32)
    counts = [len(found) for found in used.values()]
    trace = Trace(
        confidences_NK=confidences if calibrate is None else calibrate(confidences),
        accepted_N=np.array([row["accepted"] for row in flat], dtype=np.int64),
        first_round_Q=np.cumsum([0, *counts[:-1]]),
        output_tokens_Q=np.array([sum(row["emitted"] for row in answers[answer]) for answer in used]),
    )
    return RecordedTrace(trace, len(keys), len(keys) - len(flat))


def _whole(row: dict[str, Any], block: int) -> bool:
    return bool(row["proposed"] == block or row["accepted"] < row["proposed"])


def _rows(path: str | Path) -> list[dict[str, Any]]:
    try:
        schema = pq.read_schema(path)
        missing = [name for name in _COLUMNS if name not in schema.names]
        if missing:
            raise ConfigError(f"{path}: lacks the columns {missing}; wanted an evaluation's rounds.parquet")
        names = [*_COLUMNS, *(name for name in _OPTIONAL if name in schema.names)]
        rows: list[dict[str, Any]] = pq.read_table(path, columns=names).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"simulation.rounds {path}: not a readable Parquet table: {error}") from error
    return rows
