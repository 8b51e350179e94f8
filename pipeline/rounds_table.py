"""The tables of an evaluation as Parquet: every round and every answer. Calibration and simulation read the rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.acceptance import DecodeRow, RoundRow
from pipeline.errors import ConfigError

ROUNDS, DECODES = "rounds.parquet", "decodes.parquet"
ROUND_SCHEMA = pa.schema(
    {
        "drafter": pa.string(),
        "temperature": pa.float32(),
        "domain": pa.string(),
        "language": pa.string(),
        "prompt_id": pa.string(),
        "turn": pa.int32(),
        "round": pa.int32(),
        "position": pa.int32(),
        "proposed": pa.int32(),
        "accepted": pa.int32(),
        "emitted": pa.int32(),
        "confidences": pa.list_(pa.float32()),
        "draft_ids": pa.list_(pa.int32()),
    }
)
DECODE_SCHEMA = pa.schema(
    {
        "drafter": pa.string(),
        "temperature": pa.float32(),
        "domain": pa.string(),
        "language": pa.string(),
        "prompt_id": pa.string(),
        "turn": pa.int32(),
        "prompt_tokens": pa.int32(),
        "output_ids": pa.list_(pa.int32()),
        "finish": pa.string(),
        "rounds": pa.int32(),
        "prefill_seconds": pa.float64(),
        "draft_seconds": pa.float64(),
        "verify_seconds": pa.float64(),
    }
)


def write_tables(folder: Path, rounds: Sequence[RoundRow], decodes: Sequence[DecodeRow]) -> None:
    """Write both tables, each renamed into place."""
    for name, rows, schema in ((ROUNDS, rounds, ROUND_SCHEMA), (DECODES, decodes, DECODE_SCHEMA)):
        temporary = folder / f".{name}.tmp"
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema), temporary, compression="zstd")
        os.replace(temporary, folder / name)


def read_rounds(folder: Path) -> list[RoundRow]:
    """The rounds of an evaluation. Raises ConfigError when there are none, or of other columns."""
    file = folder / ROUNDS
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file}: no readable table of rounds; run jobs/evaluate_drafter.py first") from error
    missing = [name for name in ROUND_SCHEMA.names if name not in table.column_names]
    if missing:
        raise ConfigError(f"{file}: has no column {', '.join(missing)}; run jobs/evaluate_drafter.py again")
    rows = table.select(ROUND_SCHEMA.names).cast(ROUND_SCHEMA).to_pylist()
    return [
        RoundRow(**{**row, "confidences": tuple(row["confidences"]), "draft_ids": tuple(row["draft_ids"])})
        for row in rows
    ]
