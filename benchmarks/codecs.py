"""Every codec, and both ways to compress its planes, on the real states of an exact cache: size, speed, error.

    python -m benchmarks.codecs build/bench/raw          # the cache that benchmarks/cache.py makes

Processor time of one thread, bytes in memory to states in memory; the baseline, plain zstd-1 on the raw bytes, takes
turns with the rest. `shard` has the frames of our shards, `level 1` what zstd makes of the same planes by itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from benchmarks.cache_codecs import in_turns
from cache_store.calibration import calibrate, field_codecs
from cache_store.fields import FieldCodec, merge_errors, tensor_errors
from cache_store.frame import Frame, literal_frames
from cache_store.reader import CacheReader
from cache_store.schema import CODECS, EXACT_CODECS, CacheSpec
from cache_store.storage import open_storage

SAMPLES, CALIBRATION = 48, 32
ROUNDS = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", help="folder or URL of a cache whose codec is exact")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    options = parser.parse_args()
    reader = CacheReader(open_storage(options.cache))
    if reader.spec.codec not in EXACT_CODECS:
        raise SystemExit(f"{options.cache}: its codec is {reader.spec.codec}; errors are measured against exact states")
    rows = measure(reader)
    if options.json:
        print(json.dumps(rows))
        return
    names = list(rows[0])
    table = Table(*names, title=f"Codecs on the captured layers of {SAMPLES} samples")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def measure(reader: CacheReader) -> list[dict[str, Any]]:
    """One row per codec and kind of frame."""
    held_out = range(CALIBRATION, min(len(reader), CALIBRATION + SAMPLES))
    states = [reader.read(position).hidden_states for position in held_out]
    scales = calibrate(_spec(reader.spec, "i8cr"), (reader.read(position) for position in range(CALIBRATION)))
    raw = sum(bits.nbytes for bits in states)
    out = np.empty(max(bits.size for bits in states), np.uint16)
    kinds: dict[str, Callable[[np.ndarray], bytes]] = {
        "level 1": lambda plane: zstandard.ZstdCompressor(level=1).compress(plane.data),
        "shard": lambda plane: literal_frames().compress(plane.data),
    }
    plain = [kinds["level 1"](bits.view(np.uint8).reshape(-1)) for bits in states]
    tasks: dict[str, Callable[[], None]] = {"zstd1 raw": lambda: _decompress(plain, states, out)}
    sizes: dict[str, tuple[float, float, float]] = {"zstd1 raw": (sum(map(len, plain)) / raw, 0.0, 0.0)}
    for name in CODECS:
        field = field_codecs(_spec(reader.spec, name), scales).captured
        encoded = [field.encode(bits) for bits in states]
        tasks[f"{name} encode"] = lambda field=field: _encode(field, states)  # type: ignore[misc]
        found = merge_errors(
            error for _, errors in encoded if errors for error in tensor_errors(_names(reader.spec), errors)
        )
        mean, largest = (float(np.mean([e.mean for e in found] or [0])), max([e.max for e in found], default=0.0))
        for kind, compress in kinds.items():
            stored = [(compress(high) if high.size else b"", low) for (high, low), _ in encoded]
            key = f"{name} {kind}"
            sizes[key] = (sum(len(a) + b.nbytes for a, b in stored) / raw, mean, largest)
            shapes = [bits.shape for bits in states]
            tasks[key] = lambda f=field, s=stored, h=shapes: _decode(f, s, h, out)  # type: ignore[misc]
    seconds = in_turns(tasks, ROUNDS)
    return [
        {
            "codec": key,
            "of raw": ratio,
            "encode GB/s": raw / 1e9 / seconds[f"{key.split()[0]} encode"] if key != "zstd1 raw" else 0.0,
            "decode GB/s": raw / 1e9 / seconds[key],
            "vs zstd1 raw": seconds["zstd1 raw"] / seconds[key],
            "row error, mean": mean,
            "row error, largest": largest,
        }
        for key, (ratio, mean, largest) in sizes.items()
    ]


def _spec(spec: CacheSpec, codec: str) -> CacheSpec:
    names = ("layer_ids", "hidden_size", "num_target_layers", "vocab_size", "last_hidden", "shard_bytes", "identity")
    return CacheSpec(codec=codec, last_codec="bss1", **{name: getattr(spec, name) for name in names})


def _names(spec: CacheSpec) -> list[str]:
    return [str(layer) for layer in spec.layer_ids]


def _decompress(frames: list[bytes], states: list[np.ndarray], out: np.ndarray) -> None:
    decompressor = zstandard.ZstdDecompressor()
    for frame, bits in zip(frames, states, strict=True):
        with decompressor.stream_reader(frame) as stream:
            stream.readinto(memoryview(out.view(np.uint8))[: bits.nbytes])


def _encode(field: FieldCodec, states: list[np.ndarray]) -> None:
    for bits in states:
        field.encode(bits)


def _decode(
    field: FieldCodec, stored: list[tuple[bytes, np.ndarray]], shapes: list[tuple[int, ...]], out: np.ndarray
) -> None:
    for (frame, low), shape in zip(stored, shapes, strict=True):
        values = int(np.prod(shape))
        target = out[:values].reshape(shape)
        high: Frame | np.ndarray = Frame(memoryview(frame), values) if frame else np.empty(0, np.uint8)
        field.decode_into((high, low), shape[1], target)


if __name__ == "__main__":
    main()
