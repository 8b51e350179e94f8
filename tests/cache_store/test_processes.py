"""The store in real processes: a writer killed at a random moment, and an install without torch."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from cache_store.audit import verify_cache
from cache_store.ledger import Ledger, seal
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, create_cache
from tests.cache_store.samples import make_sample, make_spec

ROOT = Path(__file__).resolve().parents[2]
COUNT, DEADLINE_S = 60, 60
WRITE_PENDING = f"""
import sys
from cache_store.ledger import Ledger
from cache_store.storage import open_storage
from cache_store.writer import CacheWriter, load_spec
from tests.cache_store.samples import make_sample

storage = open_storage(sys.argv[1])
spec = load_spec(storage)
while True:  # one writer per pass, so that the process is always somewhere inside the protocol
    with CacheWriter(storage, spec) as writer:
        for sample_id in Ledger(storage).pending(f"s{{n:04d}}" for n in range({COUNT})):
            writer.write(make_sample(spec, int(sample_id[1:])))
"""


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "cache"))
    spec = make_spec(shard_bytes=1500)
    create_cache(storage, spec)
    for kill in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITE_PENDING, storage.url], cwd=ROOT)
        deadline = time.monotonic() + DEADLINE_S
        while len(storage.list("commits/")) <= kill and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.wait()
    ids = [f"s{number:04d}" for number in range(COUNT)]
    with CacheWriter(storage, spec) as writer:
        for sample_id in Ledger(storage).pending(ids):
            writer.write(make_sample(spec, int(sample_id[1:])))
    manifest = seal(storage, expected_ids=ids)
    assert (manifest.num_samples, manifest.duplicates) == (COUNT, 0)
    assert CacheReader(storage).ids == ids
    assert not verify_cache(storage).damaged


def test_the_command_line_needs_neither_torch_nor_ray() -> None:
    code = "import sys, cache_store.cli; print(*sorted({'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
