"""One progress line for every stage: done/total, rate, time left, failures; the same record as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressRecord:
    """A stage's state at one moment; rate in units per second, eta in seconds (None before the first unit)."""

    stage: str
    unit: str
    done: int
    total: int
    failed: int
    rate: float
    eta: float | None
    elapsed: float
    detail: str

    def line(self) -> str:
        """The one-line form that every stage prints."""
        percent = 100 * self.done / self.total if self.total else 100.0
        eta = "--:--" if self.eta is None else format_duration(self.eta)
        parts = [
            f"{self.stage:<12} {self.done:,}/{self.total:,} {self.unit} ({percent:.0f} %)",
            f"{self.rate:,.{1 if self.rate >= 1 else 2}f} {self.unit}/s",
            f"ETA {eta}",
            f"failed {self.failed}",
        ]
        return " | ".join([*parts, self.detail] if self.detail else parts)


def format_duration(seconds: float) -> str:
    """`mm:ss`, or `h:mm:ss` from one hour on."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"


_LONGEST_SILENCE = 6
"""Intervals: how rarely a stage that gets nothing done says so."""


class Progress:
    """Counts a stage's units and prints a line at most every `interval` seconds, and always at the end.

    `already` units were done by an earlier run: they count towards the total, not towards the rate. Rate and time left
    are of the time since the first units came, once more have come (before, no time left is known): an engine's start
    would hide the pace otherwise.
    While nothing new comes, lines are twice as far apart each time, up to six intervals.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        *,
        unit: str = "samples",
        already: int = 0,
        interval: float = 10.0,
        log_file: Path | None = None,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self.already, self.done, self.failed = already, already, 0
        self._interval, self._log_file, self._clock = interval, log_file, clock
        self._stream = stream if stream is not None else sys.stdout
        self._started = clock()
        self._last_print = float("-inf")
        self._first: tuple[float, int] | None = None
        self._said, self._silence = (-1, -1, ""), 1

    def update(self, done: int = 0, *, failed: int = 0, detail: str = "") -> None:
        """Add finished and failed units; print when the interval has passed."""
        self.done += done
        self.failed += failed
        if self._first is None and done:
            self._first = (self._clock(), self.done)
        news = (self.done, self.failed) != self._said[:2]
        wait = self._interval * (1 if news else self._silence)
        if self._clock() - self._last_print >= wait:
            self._silence = 1 if news else min(2 * self._silence, _LONGEST_SILENCE)
            self._emit(detail)

    def finish(self, detail: str = "") -> ProgressRecord:
        """Print the last line whatever the interval, unless it stands there already, and return its record."""
        if self._said == (self.done, self.failed, detail):
            return self.record(detail)
        return self._emit(detail)

    def record(self, detail: str = "") -> ProgressRecord:
        """The state now, without printing."""
        now = self._clock()
        elapsed, since, counted = now - self._started, self._started, self.already
        if self._first is not None and self.done > self._first[1]:
            since, counted = self._first
        rate = (self.done - counted) / (now - since) if now > since else 0.0
        left = max(0, self.total - self.done - self.failed)
        eta = left / rate if rate > 0 and (since != self._started or left == 0) else None
        return ProgressRecord(
            stage=self.stage,
            unit=self.unit,
            done=self.done,
            total=self.total,
            failed=self.failed,
            rate=rate,
            eta=eta,
            elapsed=elapsed,
            detail=detail,
        )

    def _emit(self, detail: str) -> ProgressRecord:
        record = self.record(detail)
        self._last_print, self._said = self._clock(), (self.done, self.failed, detail)
        print(record.line(), file=self._stream, flush=True)
        if self._log_file is not None:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with self._log_file.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"time": time.time(), **asdict(record)}) + "\n")
        return record
