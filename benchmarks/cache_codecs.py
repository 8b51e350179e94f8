"""Sizes, exactness and errors of the codecs on real states, and decoding speed: parts of `benchmarks/cache.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import zstandard

from benchmarks.cache_data import variant
from cache_store import codec
from cache_store.reader import CacheReader
from cache_store.storage import Storage
from model.target_heads import load_target_heads

FORMATS = ("parquet", "tar")
MASSIVE = 20_000.0
TV_POSITIONS, TV_CHUNK = 2048, 256
ROUNDS = 5


def raw_bytes(source: CacheReader) -> int:
    """bf16 states of every token: captured layers and last hidden state."""
    return int(source.tokens.sum()) * (source.spec.num_layers + 1) * source.spec.hidden_size * 2


def stored_bytes(storage: Storage) -> int:
    """Every object of a cache: shards, records, index, settings."""
    return sum(info.size for info in storage.list(""))


def sizes(source: CacheReader, folder: Path) -> dict[str, float]:
    """Stored bytes per raw byte, the larger one of both containers."""
    raw = raw_bytes(source)
    figures = {}
    for name, changes in (
        ("lossless_ratio", {"codec": "bss1"}),
        ("lossless_ratio_needed_last", {"codec": "bss1", "last_hidden": "needed"}),
        ("i8cr_ratio", {"codec": "i8cr", "last_codec": "i8cr"}),
    ):
        for form in FORMATS:
            storage = variant(source, folder, f"{name}-{form}", format=form, **changes)
            figures[f"{name}_{form}"] = stored_bytes(storage) / raw
        figures[name] = max(figures[f"{name}_{form}"] for form in FORMATS)
    return figures


def exactness(source: CacheReader, folder: Path) -> dict[str, float]:
    """Samples whose states differ from the source in any bit, over both lossless caches (0 wanted)."""
    different = 0
    for form in FORMATS:
        reader = CacheReader(variant(source, folder, f"lossless_ratio-{form}", format=form))
        for position in range(len(source)):
            a, b = source.read(position), reader.read(position)
            same = np.array_equal(a.hidden_states, b.hidden_states)
            different += not (same and np.array_equal(a.last_hidden_state, b.last_hidden_state))
    return {"lossless_samples_that_differ": float(different)}


def bounded_errors(source: CacheReader, folder: Path, target: Path) -> dict[str, float]:
    """What i8cr does to the values: relative error of every tensor, the target's distribution, massive activations."""
    storage = variant(source, folder, "i8cr_ratio-parquet", codec="i8cr", last_codec="i8cr")
    reader = CacheReader(storage)
    names = [*map(str, source.spec.layer_ids), "last"]
    noise, signal = np.zeros(len(names)), np.zeros(len(names))
    massive, massive_error = 0, 0.0
    for position in range(len(source)):
        a, b = source.read(position), reader.read(position)
        for number, (exact, found) in enumerate(
            zip([*a.hidden_states, a.last_hidden_state], [*b.hidden_states, b.last_hidden_state], strict=True)
        ):
            x, y = (codec.to_float(bits).astype(np.float64) for bits in (exact, found))
            noise[number] += ((x - y) ** 2).sum()
            signal[number] += (x**2).sum()
            huge = np.abs(x) > MASSIVE
            massive += int(huge.sum())
            if huge.any():
                massive_error = max(massive_error, float(np.abs(y[huge] / x[huge] - 1).max()))
    relative = dict(zip(names, np.sqrt(noise / signal).tolist(), strict=True))
    assert reader.manifest is not None
    return {
        **{f"i8cr_error_{name}": value for name, value in relative.items()},
        "i8cr_error_worst_tensor": max(relative.values()),
        "i8cr_error_worst_row": max(error.max for error in reader.manifest.errors),
        "i8cr_total_variation": total_variation(source, reader, target),
        "i8cr_massive_values": float(massive),
        "i8cr_massive_error": massive_error,
    }


def total_variation(source: CacheReader, reader: CacheReader, target: Path) -> float:
    """Mean of ½ Σ|p - p̂| of the target's next-token distribution, over supervised positions drawn at random."""
    heads = load_target_heads(target, dtype=torch.float32)
    rng = np.random.default_rng(0)
    pairs = []
    for position in rng.permutation(len(source)):
        exact, found = source.read(int(position)), reader.read(int(position))
        rows = rng.permutation(np.flatnonzero(exact.loss_mask[1:]))[: -(-TV_POSITIONS // len(source))]
        pairs.append((exact.last_hidden_state[rows], found.last_hidden_state[rows]))
    exact_PD, found_PD = (torch.from_numpy(codec.to_float(np.concatenate(part))) for part in zip(*pairs, strict=True))
    total = 0.0
    with torch.inference_mode():
        for p, q in zip(exact_PD.split(TV_CHUNK), found_PD.split(TV_CHUNK), strict=True):
            difference = heads.logits(p).softmax(-1) - heads.logits(q).softmax(-1)
            total += float(0.5 * difference.abs().sum())
    return total / len(exact_PD)


def decode_speed(source: CacheReader, folder: Path) -> dict[str, float]:
    """Processor time of one thread: compressed planes in memory -> states, against plain zstd-1 of the raw bytes."""
    raws, ours = [], []
    compressor = zstandard.ZstdCompressor(level=1)
    reader = CacheReader(variant(source, folder, "lossless_ratio-parquet"), verify="never")
    for position in range(len(source)):
        sample = source.read(position)
        raw = sample.hidden_states.tobytes() + sample.last_hidden_state.tobytes()
        raws.append((compressor.compress(raw), len(raw)))
        ours.append(reader.fetch(position))
    out = np.empty(max(size for _, size in raws), np.uint8)
    spec = reader.spec

    def decode_ours() -> None:
        for position, stored in enumerate(ours):
            tokens = int(reader.tokens[position])
            hidden = out[: spec.num_layers * tokens * spec.hidden_size * 2].view(np.uint16)
            last = out[hidden.nbytes : hidden.nbytes + tokens * spec.hidden_size * 2].view(np.uint16)
            reader.decode_into(
                position, stored, hidden.reshape(spec.num_layers, tokens, -1), last.reshape(tokens, spec.hidden_size)
            )

    def decode_zstandard() -> None:
        decompressor = zstandard.ZstdDecompressor()
        for frame, _ in raws:
            decompressor.decompress(frame)

    def decode_arrow() -> None:
        decompressor = pa.Codec("zstd")
        for frame, size in raws:
            decompressor.decompress(frame, decompressed_size=size)

    seconds = in_turns({"ours": decode_ours, "zstandard": decode_zstandard, "arrow": decode_arrow}, ROUNDS)
    gigabytes = raw_bytes(source) / 1e9
    baseline = min(seconds["zstandard"], seconds["arrow"])
    return {
        "decode_gb_per_s": gigabytes / seconds["ours"],
        "zstd1_raw_gb_per_s": gigabytes / baseline,
        "zstd1_raw_ratio": sum(len(frame) for frame, _ in raws) / raw_bytes(source),
        "decode_vs_zstd1_raw": baseline / seconds["ours"],
    }


def in_turns(
    tasks: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Median seconds of each task; the tasks take turns, so that a busy machine slows all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 1):
        for name, task in tasks.items():
            started = clock()
            task()
            if number:  # the first round warms up
                taken[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in taken.items()}
