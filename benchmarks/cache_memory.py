"""Memory of a streaming reader, for a cache and for one 100 times larger: part of `benchmarks/cache.py`.

python benchmarks/cache_memory.py CACHE          # one cache, in a fresh process; prints a JSON line
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

SAMPLES, TOKENS, TIMES = 40, 48, 100
LIMIT_MB, SLACK_MB = 32, 96
"""Bound on ready batches; and what a Python process may take besides: code first used while reading, the index, one
sample as stored."""
WORKERS, BATCH = 2, 4
SHARD_BYTES = 16 << 20
POLL_S = 0.02


def memory(source: Any, folder: Path) -> dict[str, float]:
    """Peak memory beyond that of the idle processes, of a stream over both caches."""
    figures: dict[str, float] = {}
    for name, times in (("1x", 1), ("100x", TIMES)):
        url = write(source, folder / f"memory-{name}", times)
        command = [sys.executable, __file__, str(url)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for key, value in json.loads(done.stdout.splitlines()[-1]).items():
            figures[f"stream_{key}_{name}"] = value
    figures["stream_memory_bound_mb"] = float(LIMIT_MB + SLACK_MB)
    figures["stream_memory_vs_bound"] = figures["stream_peak_mb_100x"] / figures["stream_memory_bound_mb"]
    return figures


def write(source: Any, url: Path, times: int) -> Path:
    """A cache of the last tokens of real samples, each stored `times` times under ids of its own."""
    from cache_store.ledger import seal
    from cache_store.schema import CacheSpec
    from cache_store.storage import open_storage
    from cache_store.writer import CacheWriter, create_cache

    if (url / "manifest.json").exists():
        return url
    storage, old = open_storage(str(url)), source.spec
    spec = CacheSpec(
        layer_ids=old.layer_ids,
        hidden_size=old.hidden_size,
        num_target_layers=old.num_target_layers,
        vocab_size=old.vocab_size,
        codec="bss1",
        last_hidden="all",
        shard_bytes=SHARD_BYTES,
        identity=old.identity,
    )
    create_cache(storage, spec)
    samples = [source.read(position) for position in range(min(SAMPLES, len(source)))]
    with CacheWriter(storage, spec) as writer:
        for number, sample in itertools.product(range(times), samples):
            cut = replace(
                sample,
                sample_id=f"{number}-{sample.sample_id}",
                input_ids=sample.input_ids[-TOKENS:],
                loss_mask=sample.loss_mask[-TOKENS:],
                hidden_states=sample.hidden_states[:, -TOKENS:],
                last_hidden_state=sample.last_hidden_state[-TOKENS:],
            )
            writer.write(cut)
    seal(storage, expected_ids=None)
    return url


def resident_mb(children: bool = True) -> float:
    """Memory of this process and its loader processes; what they share is counted once (PSS)."""
    own = Path("/proc/self")
    processes = [own]
    if children:
        listed = (own / "task").glob("*/children")
        pids = [pid for path in listed for pid in path.read_text().split()]
        processes += [Path("/proc") / pid for pid in pids]
    total = 0
    for process in processes:
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def main() -> None:
    """Stream one epoch with loader processes, watching the memory of all of them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from cache_store.dataset import TargetCacheStream, make_loader
    from cache_store.mixture import SampleSet, Source
    from cache_store.packing import StreamConfig
    from cache_store.storage import open_storage

    sources = [Source(storage=open_storage(sys.argv[1]))]
    samples = SampleSet(sources)
    stored = sum(shard.num_bytes for shard in samples.readers[0].shards) / 2**20
    config = StreamConfig(
        seed=0, global_batch_size=BATCH, micro_batch_size=BATCH, max_length=1 << 20, num_steps=len(samples) // BATCH
    )
    del samples
    loader = make_loader(
        TargetCacheStream(sources, config), num_workers=WORKERS, prefetch=64, prefetch_bytes=LIMIT_MB << 20
    )
    before, peak, done = resident_mb(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(POLL_S):
            peak = max(peak, resident_mb())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    batches = sum(1 for _ in loader)
    done.set()
    watcher.join()
    print(json.dumps({"peak_mb": peak - before, "stored_mb": stored, "batches": float(batches)}))


if __name__ == "__main__":
    main()
