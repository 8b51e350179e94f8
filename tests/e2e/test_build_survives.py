"""kill -9 of the driver, of vLLM's engine process or of an extraction actor, then the same command: nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from cache_store.ledger import Ledger
from cache_store.reader import CacheReader
from cache_store.storage import open_storage
from tests.pipeline.hf_target import save_tiny_target

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 120
COMPLETE = (0, 3)
PATIENCE_S = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# What is killed, and the folder whose first file says that its phase is under way.
VICTIMS = {
    "driver-generating": ("", "responses"),
    "driver-extracting": ("", "commits"),
    "engine": ("EngineCore", "responses"),
    "extractor": ("ExtractActor", "commits"),
}


@dataclass
class Build:
    """The public command on a tiny target, in a process group of its own."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "jobs/build_cache.py", "--config", str(self.folder / "config.yaml")]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.processes.append(process)
        return process

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        return process.wait(PATIENCE_S)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                kill_tree(process.pid)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    target = save_tiny_target(tmp_path / "target", head_dim=32)
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"question {n}"}]} for n in range(PROMPTS)]
    lines = [*map(json.dumps, rows), "{broken", json.dumps({"id": "long", "prompt": "word " * 400})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    config = {
        "name": "survives",
        "max_length": 160,
        "target": {"path": str(target), "dtype": "float32"},
        "prompts": {"sources": [str(tmp_path / "prompts.jsonl")]},
        "generation": {
            "batch_size": 8,
            "rows_per_file": 8,
            "sampling": {"max_new_tokens": 48},
            "engine_kwargs": {"max_num_seqs": 8},
            "engine_env": {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        },
        "extraction": {"layer_ids": [0, 2], "samples_per_task": 8},
        "cache": {"url": str(tmp_path / "cache"), "shard_mb": 1},
        "drafter": {"mask_token": "<|endoftext|>"},
        "training": {"output": str(tmp_path / "run"), "global_batch_size": 8},
        "cluster": {"object_store_mb": 100},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    running = Build(tmp_path)
    try:
        yield running
    finally:
        running.end()


@pytest.mark.parametrize("victim", VICTIMS)
def test_every_prompt_once_after_a_kill(build: Build, victim: str) -> None:
    mark, folder = VICTIMS[victim]
    delay = random.uniform(0.0, 0.5)
    process = build.start()
    wait_for_file(build, process, folder)
    time.sleep(delay)
    killed = kill_marked(process.pid, mark)
    assert killed or process.poll() is not None, f"no process of {process.pid} matches {mark!r}"
    code = build.finish(process)
    for _ in range(2):
        if code in COMPLETE:
            break
        code = build.finish(build.start())
    assert code == 3, f"{victim} killed {delay:.2f} s into its phase; the build ended with {code}:\n{build.log()}"

    storage = open_storage(str(build.folder / "cache"))
    cached, rejected = sorted(CacheReader(storage).ids), set(Ledger(storage).rejected())
    assert cached == sorted(f"p{n}" for n in range(PROMPTS))
    assert rejected == {f"{build.folder}/prompts.jsonl:{PROMPTS + 1}", "long"}


def wait_for_file(build: Build, process: subprocess.Popen[bytes], folder: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if any(path.is_file() for path in (build.folder / "cache" / folder).rglob("*")):
            return
        assert process.poll() is None, f"the build ended before {folder}/ held anything:\n{build.log()}"
        time.sleep(0.02)
    pytest.fail(f"nothing appeared in {folder}/ within {PATIENCE_S} s:\n{build.log()}")


def kill_marked(driver: int, mark: str) -> list[int]:
    """SIGKILL the driver itself (no mark), or those of its descendants whose command line holds the mark."""
    if not mark:
        family = descendants(driver)
        os.kill(driver, signal.SIGKILL)
        psutil.wait_procs(family, timeout=60)  # Ray's own processes notice and end
        return [driver]
    victims = [process for process in descendants(driver) if mark in command_line(process)]
    for process in victims:
        process.kill()
    return [process.pid for process in victims]


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill_tree(pid: int) -> None:
    for process in [*descendants(pid), psutil.Process(pid)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
