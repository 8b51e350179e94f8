"""The cost table SPS(B) (DSpark §4): how many steps per second the target makes with B tokens in one forward pass.

Measured once per target and device, stored as strict versioned JSON, read as a step function. The module knows no
engine: whoever measures hands in a function that runs one step.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from model.errors import CostTableError

VERSION = 1
MONOTONE_TOLERANCE = 0.05
"""Speed gained by adding tokens that still counts as noise of the measurement."""

Kind = Literal["measured", "synthetic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Steps per second at each measured number of tokens per forward pass, and what drafting costs beside it.

    Raises CostTableError for tables that are not ascending from 1, or hold anything but positive finite speeds.
    """

    device: str
    target: str
    kind: Kind
    """A synthetic table comes from a formula, not from a device; whatever shows the table says so."""
    context_tokens: int
    """Tokens in the key/value cache during the measurement."""
    tokens: tuple[int, ...]
    """B, ascending from 1."""
    steps_per_second: tuple[float, ...]
    draft_seconds: float = 0.0
    """Seconds of one drafting pass, whatever its size."""
    draft_seconds_per_token: float = 0.0
    """Seconds per drafted position (requests x positions of the block) on top of it."""
    note: str = ""
    seconds_B: np.ndarray = field(init=False, repr=False, compare=False)
    """float64 [max_tokens]: seconds of a step of B tokens at index B - 1; read-only."""

    def __post_init__(self) -> None:
        """Check, then expand the steps."""
        problems = _problems(self)
        if problems:
            raise CostTableError(f"cost table of {self.target} on {self.device}: {'; '.join(problems)}")
        steps = np.diff(np.array([0, *self.tokens]))
        seconds = np.repeat(1.0 / np.array(self.steps_per_second, dtype=np.float64), steps)
        seconds.flags.writeable = False
        object.__setattr__(self, "seconds_B", seconds)

    @property
    def max_tokens(self) -> int:
        """The largest measured B: nothing is known beyond it, so nothing is scheduled beyond it."""
        return self.tokens[-1]

    def at(self, tokens: int) -> float:
        """SPS(B), steps per second; between two measured sizes the larger one's (engines pad up to a captured size).

        Raises CostTableError outside 1..max_tokens.
        """
        if not 1 <= tokens <= self.max_tokens:
            raise CostTableError(
                f"cost table of {self.target} on {self.device} covers 1 to {self.max_tokens} tokens, asked for "
                f"{tokens}; measure a larger table, or run fewer requests at a time"
            )
        return 1.0 / float(self.seconds_B[tokens - 1])

    def draft_cost(self, drafted: int) -> float:
        """Seconds to draft `drafted` positions in one pass; 0 for none."""
        return self.draft_seconds + self.draft_seconds_per_token * drafted if drafted else 0.0

    def speed_ups(self) -> list[tuple[int, float]]:
        """Measured sizes whose step is faster than a smaller one's by more than the tolerance: (B, relative gain).

        More tokens cannot cost less; a long list means that the machine was busy while it was measured.
        """
        slowest, found = math.inf, []
        for tokens, speed in zip(self.tokens, self.steps_per_second, strict=True):
            if speed > slowest * (1 + MONOTONE_TOLERANCE):
                found.append((tokens, speed / slowest - 1))
            slowest = min(slowest, speed)
        return found

    def smoothed(self) -> CostTable:
        """The table with cliffs and noise taken out: the largest convex function below the seconds of a step.

        Algorithm 1 stops at the first drop of its objective, so at a cliff it stops even where the flat stretch behind
        would pay for the climb; on the convex table it weighs the cost per token over the whole stretch.
        """
        hull: list[tuple[int, float]] = []
        for point in enumerate(self.seconds_B.tolist(), start=1):
            while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        every = np.arange(1, self.max_tokens + 1)
        seconds = np.interp(every, [tokens for tokens, _ in hull], [second for _, second in hull])
        return CostTable(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.init}
            | {
                "tokens": tuple(every.tolist()),
                "steps_per_second": tuple((1.0 / seconds).tolist()),
                "note": f"{self.note} (smoothed)".strip(),
            }
        )

    def to_json(self) -> str:
        """The table as JSON text."""
        data = asdict(self)
        del data["seconds_B"]
        return json.dumps({"version": VERSION, **data}, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "cost table") -> CostTable:
        """Read `to_json`'s text; unknown, missing and mistyped fields are errors.

        Raises CostTableError naming `where` and the field.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CostTableError(f"{where}: not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise CostTableError(f"{where}: wanted an object with version {VERSION}; measure the table again")
        known = {f.name: f for f in fields(cls) if f.init}
        wrong = sorted(data.keys() - known) + sorted(
            name for name in known if name in data and not _has_type(name, data[name])
        )
        required = set(known) - {"draft_seconds", "draft_seconds_per_token", "note"}
        missing = sorted(required - data.keys())
        if wrong or missing:
            raise CostTableError(f"{where}: unknown or mistyped fields {wrong}, missing fields {missing}")
        lists = {name: tuple(data[name]) for name in ("tokens", "steps_per_second")}
        try:
            return cls(**{**data, **lists})
        except CostTableError as error:
            raise CostTableError(f"{where}: {error}") from error


def save_cost_table(table: CostTable, path: str | Path) -> None:
    """Write the table as JSON, replacing the file at once."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + ".tmp")
    scratch.write_text(table.to_json(), encoding="utf-8")
    scratch.replace(target)


def load_cost_table(path: str | Path) -> CostTable:
    """Read a table. Raises CostTableError naming the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CostTableError(
            f"{path}: cannot read the cost table: {error.strerror or error}; make one with jobs/measure_cost.py"
        ) from error
    return CostTable.from_json(text, str(path))


def measure(
    step: Callable[[int], None],
    sizes: Sequence[int],
    *,
    repeats: int,
    warm_up: int,
    clock: Callable[[], float] = time.perf_counter,
    on_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Median seconds of `step(size)` for every size, after `warm_up` untimed calls of each; `on_step` follows each.

    `step` returns when its work is done (on a GPU it synchronises). The sizes are visited in turn within each repeat,
    so that a machine that slows down slows all of them alike. Raises CostTableError for an empty or impossible order.
    """
    if not sizes or min(sizes) < 1 or repeats < 1 or warm_up < 0:
        raise CostTableError(
            f"cannot measure sizes {list(sizes)} with {repeats} repeats after {warm_up} warm-up calls; wanted positive "
            "sizes, at least one repeat and no negative warm-up"
        )
    for size in sizes:
        for _ in range(warm_up):
            step(size)
            on_step()
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats):
        for size, taken in zip(sizes, times, strict=True):
            started = clock()
            step(size)
            taken.append(clock() - started)
            on_step()
    return [statistics.median(taken) for taken in times]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """A device and a target in six numbers, for a table before anybody has the device."""

    weight_bytes: float
    """Read once per step."""
    flops_per_token: float
    bandwidth: float
    """Bytes per second that are reached, not those of the data sheet; so for `compute`."""
    compute: float
    """FLOP per second."""
    launch_seconds: float
    """Per step, whatever it does."""
    sharpness: float
    """p of the knee ((memory time)^p + (compute time)^p)^(1/p): larger is sharper."""

    def seconds(self, tokens: int) -> float:
        """Of a step; key/value reads, which grow with requests and not with tokens, are left out."""
        memory = self.weight_bytes / self.bandwidth
        compute = tokens * self.flops_per_token / self.compute
        return float(self.launch_seconds + (memory**self.sharpness + compute**self.sharpness) ** (1 / self.sharpness))


def roofline_table(line: Roofline, *, device: str, target: str, sizes: Sequence[int], draft: Roofline) -> CostTable:
    """A synthetic table: a step of B tokens costs what the next of `sizes` costs, as engines pad to captured sizes.

    `draft` describes one drafting pass over as many positions; its time is written as a constant and a share per
    position, the line through no position and the largest size.
    """
    start = draft.seconds(0)
    return CostTable(
        device=device,
        target=target,
        kind="synthetic",
        context_tokens=0,
        tokens=tuple(sizes),
        steps_per_second=tuple(1.0 / line.seconds(size) for size in sizes),
        draft_seconds=start,
        draft_seconds_per_token=(draft.seconds(sizes[-1]) - start) / sizes[-1],
        note=f"roofline: {line}; drafting: {draft}",
    )


def _turns_down(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _problems(table: CostTable) -> list[str]:
    problems = []
    tokens, speeds = table.tokens, table.steps_per_second
    if not tokens or tokens[0] != 1 or any(b <= a for a, b in itertools.pairwise(tokens)):
        problems.append(f"tokens {list(tokens)[:8]} must ascend from 1")
    if len(tokens) != len(speeds):
        problems.append(f"{len(tokens)} token counts but {len(speeds)} speeds")
    if any(not (math.isfinite(speed) and speed > 0) for speed in speeds):
        problems.append("steps_per_second must be positive and finite")
    for name in ("draft_seconds", "draft_seconds_per_token", "context_tokens"):
        value = getattr(table, name)
        if not (math.isfinite(value) and value >= 0):
            problems.append(f"{name} is {value}, wanted 0 or more")
    if table.kind not in get_args(Kind):
        problems.append(f"kind is {table.kind!r}, wanted one of {list(get_args(Kind))}")
    return problems


def _has_type(name: str, value: Any) -> bool:
    if name in ("device", "target", "kind", "note"):
        return isinstance(value, str)
    if name == "tokens":
        return isinstance(value, list) and all(_is_int(item) for item in value)
    if name == "steps_per_second":
        return isinstance(value, list) and all(_is_number(item) for item in value)
    return _is_int(value) if name == "context_tokens" else _is_number(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)
