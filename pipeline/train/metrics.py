"""metrics.jsonl and TensorBoard: one record per logged step, written by rank 0, without repeats after a resume."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.atomic_file import write_atomically

METRICS = "metrics.jsonl"


class MetricsWriter:
    """Appends records. Opening it at step s drops records beyond s: a resumed run writes those again."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        kept = [record for record in read_metrics(self._path) if record["step"] <= start_step]
        write_atomically(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One record. Numbers that JSON cannot hold (inf, NaN) are stored as null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"train/{name}", value, step)
        self._board.flush()

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records of a metrics.jsonl; a line cut by a crash is dropped. No file: no records."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # the process died within this line; its step is written again
    return records
