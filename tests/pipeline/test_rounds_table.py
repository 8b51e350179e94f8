"""The rounds as Parquet: the columns that others read, and back."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError
from pipeline.rounds_table import DECODES, ROUNDS, read_rounds, write_tables
from tests.pipeline.test_acceptance import make_decode, make_round


def test_rounds_come_back_as_they_were(tmp_path: Path) -> None:
    rounds = [
        make_round(2, confidences=(0.5, 0.25, 0.125), draft_ids=(4, 5, 6), round=7, temperature=0.5, language="de"),
        make_round(0, drafter="untrained"),
    ]
    write_tables(tmp_path, rounds, [make_decode("trained", (1, 2, 3))])
    assert read_rounds(tmp_path) == rounds
    assert pq.read_table(tmp_path / DECODES)["output_ids"].to_pylist() == [[1, 2, 3]]


def test_the_columns_that_calibration_and_simulation_read(tmp_path: Path) -> None:
    write_tables(tmp_path, [], [])  # the types do not depend on the rows
    schema = pq.read_schema(tmp_path / ROUNDS)
    wanted = {
        "prompt_id": pa.string(),
        "domain": pa.string(),
        "temperature": pa.float32(),
        "round": pa.int32(),
        "position": pa.int32(),
        "proposed": pa.int32(),
        "accepted": pa.int32(),
        "emitted": pa.int32(),
        "confidences": pa.list_(pa.float32()),
        "draft_ids": pa.list_(pa.int32()),
    }
    assert {name: schema.field(name).type for name in wanted} == wanted


def test_missing_tables_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rounds\.parquet: no readable table of rounds"):
        read_rounds(tmp_path)
    pq.write_table(pa.table({"drafter": ["trained"]}), tmp_path / ROUNDS)
    with pytest.raises(ConfigError, match=r"has no column temperature, domain"):
        read_rounds(tmp_path)
