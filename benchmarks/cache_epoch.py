"""A shuffled epoch through a DataLoader with 2 workers: ours, WebDataset's and MosaicML Streaming's own readers.

All three read the same samples, uncompressed and each in its own format, and yield padded batches of BATCH samples.
Every system runs in a process of its own that waits for `go` on its standard input, so that they take turns; the clock
runs from the first batch to the last of RUN_EPOCHS epochs, so that starting workers counts for nobody.

    python benchmarks/cache_epoch.py SYSTEM FOLDER [LIBRARIES]      # one system, used by benchmarks/cache.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

BATCH, WORKERS, PREFETCH, RUN_EPOCHS, ROUNDS = 4, 2, 4, 5, 5
MDS_PACKAGES = ("mosaicml-streaming", "python-snappy", "cramjam", "zstd", "brotli", "xxhash", "catalogue")
# Only the image datasets of MosaicML Streaming use torchvision, but importing the package imports them.
TORCHVISION_STUB = {
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "def to_tensor(picture): ...\n",
}
SYSTEMS = ("parquet", "tar", "webdataset", "mosaicml")


def epochs(source: Any, folder: Path) -> dict[str, float]:
    """Samples per second of every system, and ours (the slower container) against each of the others."""
    libraries = install_mosaicml(folder / "mosaicml")
    write_others(source, folder, libraries)
    children = {}
    for name in SYSTEMS:
        command = [sys.executable, __file__, name, str(folder), str(libraries)]
        children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    try:
        for number in range(ROUNDS + 1):
            for name, child in children.items():
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write("go\n")
                child.stdin.flush()
                line = child.stdout.readline()
                if not line:
                    raise SystemExit(f"{name} ended with {child.wait()}")
                if number:  # the first round warms up
                    rates[name].append(json.loads(line)["samples_per_s"])
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    figures = {f"epoch_samples_per_s_{name}": statistics.median(values) for name, values in rates.items()}
    ours = min(figures[f"epoch_samples_per_s_{name}"] for name in ("parquet", "tar"))
    for name in ("webdataset", "mosaicml"):
        figures[f"epoch_vs_{name}"] = ours / figures[f"epoch_samples_per_s_{name}"]
    return figures


def install_mosaicml(folder: Path) -> Path:
    """A folder of its own with MosaicML Streaming: its pins (numpy, transformers) conflict with ours, so --no-deps."""
    if not (folder / "done").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            *MDS_PACKAGES,
        ]
        subprocess.run(command, check=True, capture_output=True)  # pip warns about every index that it skips
        for name, text in TORCHVISION_STUB.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / "done").touch()
    return folder


def write_others(source: Any, folder: Path, libraries: Path) -> None:
    """The samples as WebDataset and MDS shards, states token-major as batches want them, unless they stand there."""
    from benchmarks.cache_data import SHARD_BYTES

    if not (folder / "webdataset" / "done").exists():
        import webdataset

        (folder / "webdataset").mkdir(exist_ok=True)
        pattern = str(folder / "webdataset" / "%05d.tar")
        with webdataset.ShardWriter(pattern, maxsize=SHARD_BYTES, maxcount=10**6, verbose=0) as writer:
            for sample in rows(source):
                keys = {"__key__": sample["id"], "hidden.bin": sample["hidden"], "last.bin": sample["last"]}
                writer.write({**keys, "ids.npy": sample["ids"], "mask.npy": sample["mask"]})
        (folder / "webdataset" / "done").touch()
    if not (folder / "mds" / "index.json").exists():
        sys.path.append(str(libraries))
        from streaming import MDSWriter

        columns = {"hidden": "bytes", "last": "bytes", "ids": "ndarray:int32", "mask": "ndarray:uint8"}
        with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=SHARD_BYTES, exist_ok=True) as writer:
            for sample in rows(source):
                writer.write({name: sample[name] for name in columns})


def rows(source: Any) -> Iterator[dict[str, Any]]:
    """Samples as these libraries want them."""
    for position in range(len(source)):
        sample = source.read(position)
        yield {
            "id": sample.sample_id,
            "hidden": sample.hidden_states.transpose(1, 0, 2).tobytes(),
            "last": sample.last_hidden_state.tobytes(),
            "ids": sample.input_ids.astype(np.int32),
            "mask": sample.loss_mask.astype(np.uint8),
        }


def to_tensors(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Bytes of one sample as tensors, without a copy."""
    tokens = len(sample["ids"])
    states = {
        name: torch.frombuffer(bytearray(sample[name]), dtype=torch.bfloat16).view(tokens, -1)
        for name in ("hidden", "last")
    }
    masks = {
        "ids": torch.from_numpy(sample["ids"].astype(np.int64)),
        "mask": torch.from_numpy(np.array(sample["mask"])),
    }
    return {**states, **masks}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A padded batch."""
    tensors = [to_tensors(sample) for sample in samples]
    return {name: pad_sequence([t[name] for t in tensors], batch_first=True) for name in tensors[0]}


def batches_ours(folder: Path, form: str) -> Iterable[Any]:
    """Our stream over a raw cache."""
    from cache_store.dataset import TargetCacheStream, make_loader
    from cache_store.mixture import SampleSet, Source
    from cache_store.packing import StreamConfig
    from cache_store.storage import open_storage

    sources = [Source(storage=open_storage(str(folder / f"uncompressed-{form}")))]
    config = StreamConfig(
        seed=0,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        max_length=1 << 20,
        num_steps=RUN_EPOCHS * len(SampleSet(sources)) // BATCH,
    )
    return make_loader(TargetCacheStream(sources, config), num_workers=WORKERS, prefetch=PREFETCH)


def batches_webdataset(folder: Path) -> Iterable[Any]:
    """Shards in random order, a buffer of 64 samples shuffled, as its manual recommends."""
    import webdataset

    urls = sorted(str(path) for path in (folder / "webdataset").glob("*.tar"))

    def unpack(sample: dict[str, Any]) -> dict[str, Any]:
        return {"hidden": sample["hidden.bin"], "last": sample["last.bin"], **_arrays(sample)}

    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(64).decode("torch")
    dataset = dataset.map(unpack).batched(BATCH, collation_fn=collate, partial=False).repeat(RUN_EPOCHS)
    return DataLoader(dataset, batch_size=None, num_workers=WORKERS, prefetch_factor=PREFETCH)


def _arrays(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(sample[f"{name}.npy"]) for name in ("ids", "mask")}


def batches_mosaicml(folder: Path, libraries: str) -> Iterator[Any]:
    """Its own shuffle, all epochs with the same workers."""
    sys.path.append(libraries)
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=WORKERS,
        prefetch_factor=PREFETCH,
        collate_fn=collate,
        persistent_workers=True,
        drop_last=True,
    )
    for _ in range(RUN_EPOCHS):
        yield from loader


def main() -> None:
    """Time a run for every line of standard input."""
    system, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    torch.set_num_threads(1)
    for _ in sys.stdin:
        if system == "webdataset":
            batches: Iterable[Any] = batches_webdataset(folder)
        elif system == "mosaicml":
            batches = batches_mosaicml(folder, sys.argv[3])
        else:
            batches = batches_ours(folder, system)
        started, samples = 0.0, 0
        for batch in batches:
            if started == 0.0:
                started = time.perf_counter()
                continue
            samples += len(batch["ids"]) if isinstance(batch, dict) else len(batch.sample_ids)
        print(json.dumps({"samples_per_s": samples / (time.perf_counter() - started)}), flush=True)


if __name__ == "__main__":
    main()
