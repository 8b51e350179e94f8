"""Time of one scheduling decision, beside Algorithm 1 written down literally in plain Python, in the same run.

Confidences are drawn once with a fixed seed; the table falls slowly, so that a decision walks deep into the drafts
(`admitted` says how deep). Times are medians over repeats, microseconds per decision, compilation excluded.

    python benchmarks/scheduler.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from model.decoding.cost_table import CostTable
from model.decoding.scheduler import admit_top, best_capacity, schedule, schedule_one, warm_up

BLOCK, REQUESTS, SEED = 7, 256, 0
REPEATS = 101


class PlainSchedule(NamedTuple):
    """What Algorithm 1 decides."""

    lengths: list[int]
    expected_tokens: float
    tokens_per_second: float


def plain_schedule(
    confidences: Sequence[Sequence[float]], seconds: Sequence[float], limits: Sequence[int], overhead: float = 0.0
) -> PlainSchedule:
    """Algorithm 1 as the paper states it: list all drafts, sort by survival, admit until the objective drops.

    seconds[B - 1] is the time of a step of B tokens. A value that is no probability ends its request's list.
    """
    candidates = []
    for request, row in enumerate(confidences):
        survival = 1.0
        for position, confidence in enumerate(row[: max(limits[request], 0)]):
            if not 0.0 < confidence <= 1.0:
                break
            survival *= confidence
            if survival == 0.0:
                break
            candidates.append((-survival, request, position + 1))
    lengths = [0] * len(confidences)
    tokens, expected = len(confidences), float(len(confidences))
    best = expected / (seconds[tokens - 1] + overhead)
    for negative, request, position in sorted(candidates):
        if tokens == len(seconds):
            break
        rate = (expected - negative) / (seconds[tokens] + overhead)
        if not rate > best:
            break
        tokens, expected, best = tokens + 1, expected - negative, rate
        lengths[request] = position
    return PlainSchedule(lengths, expected, best)


def median_us(call: Callable[[], object], calls: int, repeats: int) -> float:
    """Median over `repeats` of the mean microseconds of `calls` calls in a row."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    return 1e6 * statistics.median(times)


def run(repeats: int = REPEATS) -> dict[str, float]:
    """Every figure of the benchmark."""
    rng = np.random.default_rng(SEED)
    many = rng.uniform(0.5, 1.0, (REQUESTS, BLOCK)).astype(np.float32)
    one = many[0].copy()
    sizes = tuple(range(1, REQUESTS * (BLOCK + 1) + 1))
    speeds = tuple(1.0 / (2e-3 + 4e-6 * size) for size in sizes)
    table = CostTable(
        device="any", target="any", kind="synthetic", context_tokens=0, tokens=sizes, steps_per_second=speeds
    )
    seconds, limits = table.seconds_B.tolist(), [BLOCK] * REQUESTS
    rows, capacity = many.tolist(), REQUESTS * 3
    warm_up()
    admitted = schedule(many, table).tokens - REQUESTS
    assert schedule(many, table).lengths_R.tolist() == plain_schedule(rows, seconds, limits).lengths
    return {
        "single_us": median_us(lambda: schedule_one(one, table), 2000, repeats),
        "batch256_us": median_us(lambda: schedule(many, table), 20, repeats),
        "capacity256_us": median_us(lambda: best_capacity(many, table), 20, repeats),
        "top256_us": median_us(lambda: admit_top(many, capacity, table), 20, repeats),
        "plain_single_us": median_us(lambda: plain_schedule(rows[:1], seconds, limits), 200, repeats),
        "plain_batch256_us": median_us(lambda: plain_schedule(rows, seconds, limits), 1, repeats),
        "admitted": float(admitted),
    }


def show(figures: dict[str, float]) -> None:
    """The figures as a table."""
    table = Table(title=f"One decision, blocks of {BLOCK} drafts", title_justify="left")
    for column in ("decision", "µs", "plain Python, µs", "times faster"):
        table.add_column(column, justify="left" if column == "decision" else "right")
    rows = {
        "one request": ("single_us", "plain_single_us"),
        f"{REQUESTS} requests ({figures['admitted']:.0f} drafts admitted)": ("batch256_us", "plain_batch256_us"),
        f"capacity for {REQUESTS} requests (all drafts searched)": ("capacity256_us", None),
        f"top {3 * REQUESTS} drafts of {REQUESTS} requests": ("top256_us", None),
    }
    for label, (name, baseline) in rows.items():
        plain = f"{figures[baseline]:,.1f}" if baseline else "-"
        ratio = f"{figures[baseline] / figures[name]:.0f}" if baseline else "-"
        table.add_row(label, f"{figures[name]:.2f}", plain, ratio)
    Console(width=110).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; with --json also one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    args = parser.parse_args(argv)
    figures = run()
    show(figures)
    if args.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
