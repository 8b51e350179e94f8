from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError
from pipeline.recorded_rounds import read_recorded_trace


def row(prompt: str, position: int, accepted: int, **changes: Any) -> dict[str, Any]:
    """A round of a 3-draft block that was verified whole."""
    values = {
        "drafter": "trained",
        "temperature": 1.0,
        "domain": "d",
        "prompt_id": prompt,
        "turn": 0,
        "position": position,
        "proposed": 3,
        "accepted": accepted,
        "emitted": accepted + 1,
        "confidences": [0.9, 0.8, position / 100],
    }
    return values | changes


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_answers_become_requests_in_the_order_of_their_positions(tmp_path: Path) -> None:
    rows = [row("a", 14, 2), row("b", 20, 0), row("a", 10, 3), row("a", 10, 1, turn=1)]
    found = read_recorded_trace(save(tmp_path / "rounds.parquet", rows))
    trace = found.trace
    assert trace.first_round_Q.tolist() == [0, 2, 3]
    assert trace.accepted_N.tolist() == [3, 2, 0, 1]
    assert trace.output_tokens_Q.tolist() == [7, 1, 2]
    np.testing.assert_allclose(trace.confidences_NK[:, 2], [0.10, 0.14, 0.20, 0.10], rtol=1e-6)
    assert (found.rounds, found.cut) == (4, 0)


def test_rounds_that_hide_their_blocks_fate_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        row("a", 10, 3),
        row("a", 14, 1, proposed=1),  # a threshold stopped it: what the others would have done is not known
        row("a", 16, 1, proposed=2),  # the second was rejected: known
        row("a", 18, 2, proposed=2, emitted=2),  # ended by a stop token
    ]
    found = read_recorded_trace(save(tmp_path / "rounds.parquet", rows))
    assert found.trace.accepted_N.tolist() == [3, 1]
    assert found.trace.output_tokens_Q.tolist() == [10]  # of the whole answer
    assert (found.rounds, found.cut) == (4, 2)


def test_one_temperature_and_the_trained_drafter_alone(tmp_path: Path) -> None:
    rows = [row("a", 10, 3), row("a", 10, 2, temperature=0.0), row("a", 10, 0, drafter="untrained")]
    path = save(tmp_path / "rounds.parquet", rows)
    assert read_recorded_trace(path).trace.accepted_N.tolist() == [3, 2]
    assert read_recorded_trace(path, temperature=0.0).trace.accepted_N.tolist() == [2]
    with pytest.raises(
        ConfigError, match=r"0 of 3 rounds fit .* temperature 0\.7 \(temperatures in it: \[0\.0, 1\.0\]\)"
    ):
        read_recorded_trace(path, temperature=0.7)


def test_a_table_without_drafter_and_turn_will_do(tmp_path: Path) -> None:
    bare = [{k: v for k, v in row("a", 10, 3).items() if k not in ("drafter", "turn", "domain")}]
    assert read_recorded_trace(save(tmp_path / "rounds.parquet", bare)).trace.accepted_N.tolist() == [3]


def test_confidences_are_calibrated_first(tmp_path: Path) -> None:
    path = save(tmp_path / "rounds.parquet", [row("a", 10, 3)])
    found = read_recorded_trace(path, calibrate=lambda confidences: confidences / 2)
    np.testing.assert_allclose(found.trace.confidences_NK, [[0.45, 0.4, 0.05]], rtol=1e-6)


def test_unusable_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"simulation\.rounds .*none\.parquet: not a readable Parquet table"):
        read_recorded_trace(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ConfigError, match="not a readable Parquet table"):
        read_recorded_trace(tmp_path / "text.parquet")
    short = save(tmp_path / "short.parquet", [{"prompt_id": "a"}])
    with pytest.raises(ConfigError, match=r"lacks the columns \['temperature', 'position'"):
        read_recorded_trace(short)
    blind = save(tmp_path / "blind.parquet", [row("a", 10, 3, confidences=[])])
    with pytest.raises(ConfigError, match="wanted rounds with one confidence per draft"):
        read_recorded_trace(blind)
    cut = save(tmp_path / "cut.parquet", [row("a", 10, 1, proposed=1)])
    with pytest.raises(ConfigError, match="evaluate without a confidence threshold"):
        read_recorded_trace(cut)
