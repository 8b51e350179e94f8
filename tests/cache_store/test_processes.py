"""The store in real processes: a writer killed at a random moment, and an install without the engines."""

from __future__ import annotations

import json
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


WITHOUT_ENGINES = """
import contextlib, io, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from cache_store.cli import COMMANDS, main
from cache_store.mixture import SampleSet, Source
from cache_store.packing import StreamConfig, share_of_step
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec

codes = {}
for form in ("parquet", "tar"):
    storage = open_storage(f"{sys.argv[1]}/{form}")
    build_cache(storage, make_spec(format=form), 6)
    samples = SampleSet([Source(storage=storage)])
    config = StreamConfig(seed=1, global_batch_size=4, micro_batch_size=1, max_length=32, num_steps=1, pack_tokens=64)
    share_of_step(config, len(samples), samples.tokens, 0)
    for command in ("inspect", "head", "stats", "verify", "sample", "estimate"):
        with contextlib.redirect_stdout(io.StringIO()):
            codes[f"{command} {form}"] = main([command, storage.url])
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main([name, "--help"])
        except SystemExit as left:
            codes[f"{name} --help"] = left.code
print(json.dumps(codes))
"""


def test_core_and_commands_work_without_torch_ray_vllm_and_deepspeed(tmp_path: Path) -> None:
    absent = "torch,ray,vllm,deepspeed,transformers,pydantic,yaml,matplotlib,tokenizers,model,pipeline,jobs"
    command = [sys.executable, "-c", WITHOUT_ENGINES, str(tmp_path), absent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert len(codes) > 12
    assert set(codes.values()) == {0}, codes
