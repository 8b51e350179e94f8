from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.decoding.cost_table import (
    CostTable,
    Roofline,
    load_cost_table,
    measure,
    roofline_table,
    save_cost_table,
)
from model.errors import CostTableError

STEPS = CostTable(
    device="here",
    target="t",
    kind="measured",
    context_tokens=9,
    tokens=(1, 2, 8),
    steps_per_second=(4.0, 2.0, 1.0),
    draft_seconds=0.5,
    draft_seconds_per_token=0.25,
    note="n",
)


def test_lookup_is_a_step_function_of_the_next_measured_size() -> None:
    assert [STEPS.at(tokens) for tokens in range(1, 9)] == [4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert STEPS.seconds_B.tolist() == [0.25, 0.5, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("tokens", [0, -1, 9])
def test_nothing_is_known_outside_the_table(tokens: int) -> None:
    with pytest.raises(CostTableError, match=rf"cost table of t on here covers 1 to 8 tokens, asked for {tokens}"):
        STEPS.at(tokens)


def test_the_expanded_table_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        STEPS.seconds_B[0] = 1.0


def test_drafting_costs_a_pass_and_every_position_or_nothing() -> None:
    assert STEPS.draft_cost(4) == 1.5
    assert STEPS.draft_cost(0) == 0.0


@st.composite
def tables(draw: Any) -> CostTable:
    gaps = draw(st.lists(st.integers(1, 9), min_size=0, max_size=12))
    tokens = np.cumsum([1, *gaps]).tolist()
    speed = st.floats(1e-3, 1e4)
    return CostTable(
        device=draw(st.text(max_size=5)),
        target=draw(st.text(max_size=5)),
        kind=draw(st.sampled_from(["measured", "synthetic"])),
        context_tokens=draw(st.integers(0, 9)),
        tokens=tuple(tokens),
        steps_per_second=tuple(draw(st.lists(speed, min_size=len(tokens), max_size=len(tokens)))),
        draft_seconds=draw(st.floats(0, 1)),
    )


@given(tables())
def test_json_round_trip(table: CostTable) -> None:
    read = CostTable.from_json(table.to_json())
    assert read == table
    assert read.seconds_B.tolist() == table.seconds_B.tolist()


def test_the_file_is_the_shape_that_other_tools_read(tmp_path: Path) -> None:
    save_cost_table(STEPS, tmp_path / "deep" / "table.json")
    data = json.loads((tmp_path / "deep" / "table.json").read_text())
    assert data["version"] == 1
    assert (data["tokens"], data["steps_per_second"]) == ([1, 2, 8], [4.0, 2.0, 1.0])
    assert "seconds_B" not in data
    assert load_cost_table(tmp_path / "deep" / "table.json") == STEPS
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["table.json"]


def test_optional_fields_may_be_absent() -> None:
    data = json.loads(STEPS.to_json())
    for name in ("draft_seconds", "draft_seconds_per_token", "note"):
        del data[name]
    assert CostTable.from_json(json.dumps(data)).draft_cost(3) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "wanted an object with version 1"),
        ({"speed": 1}, r"unknown or mistyped fields \['speed'\]"),
        ({"tokens": None}, r"unknown or mistyped fields \['tokens'\]"),
        ({"tokens": [1, 2, "8"]}, r"mistyped fields \['tokens'\]"),
        ({"tokens": [True, 2, 8]}, r"mistyped fields \['tokens'\]"),
        ({"context_tokens": 1.5}, r"mistyped fields \['context_tokens'\]"),
        ({"device": 7}, r"mistyped fields \['device'\]"),
        ({"tokens": [2, 4, 8]}, "must ascend from 1"),
        ({"tokens": [1, 4, 4]}, "must ascend from 1"),
        ({"tokens": [1, 2]}, "2 token counts but 3 speeds"),
        ({"steps_per_second": [1.0, 0.0, 1.0]}, "positive and finite"),
        ({"steps_per_second": [1.0, math.nan, 1.0]}, "positive and finite"),
        ({"draft_seconds": -1.0}, "draft_seconds is -1.0"),
        ({"kind": "guessed"}, "kind is 'guessed'"),
    ],
)
def test_a_wrong_file_names_itself_and_the_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(json.loads(STEPS.to_json()) | change))
    with pytest.raises(CostTableError, match=rf"table\.json: .*{message}"):
        load_cost_table(path)


def test_missing_fields_broken_json_and_no_file_are_named(tmp_path: Path) -> None:
    data = json.loads(STEPS.to_json())
    del data["device"]
    with pytest.raises(CostTableError, match=r"missing fields \['device'\]"):
        CostTable.from_json(json.dumps(data))
    with pytest.raises(CostTableError, match="not JSON"):
        CostTable.from_json("{")
    with pytest.raises(CostTableError, match="wanted an object"):
        CostTable.from_json("[]")
    with pytest.raises(CostTableError, match=r"none\.json: cannot read .* jobs/measure_cost\.py"):
        load_cost_table(tmp_path / "none.json")


def test_more_tokens_that_run_faster_are_reported() -> None:
    noisy = replace(STEPS, tokens=(1, 2, 3, 4), steps_per_second=(10.0, 5.0, 5.05, 6.0))
    assert noisy.speed_ups() == [(4, pytest.approx(0.2))]  # 1 % is noise, 20 % is not
    assert STEPS.speed_ups() == []


@given(tables())
def test_smoothed_is_the_largest_convex_function_below(table: CostTable) -> None:
    smooth, seconds = table.smoothed(), table.seconds_B
    assert smooth.max_tokens == table.max_tokens
    assert (smooth.seconds_B <= seconds * (1 + 1e-9)).all()
    assert (np.diff(smooth.seconds_B, 2) >= -1e-9 * seconds.max()).all()
    for at in range(len(seconds)):  # no line between two points of the table passes below it
        left, right = seconds[: at + 1], seconds[at:]
        lows = [
            (left[i] * j + right[j] * (at - i)) / (at - i + j) if at - i + j else seconds[at]
            for i in range(len(left))
            for j in range(len(right))
        ]
        assert smooth.seconds_B[at] == pytest.approx(min(lows), rel=1e-6)


class Clock:
    """Time that only steps move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_measure_takes_the_median_after_warming_up() -> None:
    clock, calls = Clock(), []

    def step(size: int) -> None:
        calls.append(size)
        slow = len(calls) in (1, 2, 5)  # the two warm-up calls, and once the machine
        clock.now += size * (100.0 if slow else 1.0)

    assert measure(step, [1, 3], repeats=3, warm_up=1, clock=clock) == [1.0, 3.0]
    assert calls == [1, 3, 1, 3, 1, 3, 1, 3]


@pytest.mark.parametrize(("sizes", "repeats", "warm_up"), [([], 1, 0), ([0], 1, 0), ([1], 0, 0), ([1], 1, -1)])
def test_measure_refuses_impossible_orders(sizes: list[int], repeats: int, warm_up: int) -> None:
    with pytest.raises(CostTableError, match="cannot measure"):
        measure(lambda size: None, sizes, repeats=repeats, warm_up=warm_up)


def test_a_roofline_is_flat_then_proportional_and_padded() -> None:
    line = Roofline(
        weight_bytes=1e9, flops_per_token=1e9, bandwidth=1e12, compute=1e14, launch_seconds=1e-4, sharpness=8.0
    )
    table = roofline_table(line, device="d", target="t", sizes=[1, 4, 8, 4096], draft=replace(line, weight_bytes=1e8))
    assert table.kind == "synthetic"
    assert 1 / table.at(1) == pytest.approx(1.1e-3, rel=1e-3)
    assert table.at(3) == table.at(4)
    assert 1 / table.at(4096) == pytest.approx(1e-4 + 4096e-5, rel=1e-3)
    assert table.draft_cost(4096) == pytest.approx(1e-4 + 4096e-5, rel=1e-3)
    assert table.draft_seconds == pytest.approx(2e-4)
