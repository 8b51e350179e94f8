"""The jobs as their users run them: `ray start --head`, `ray job submit --working-dir .`, the cache_store command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.demo_target import prepare_demo_target
from tests.conftest import free_ports

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CONFIG = "jobs/configs/smollm2_demo.yaml"
START_TIMEOUT_S = 90

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Cluster:
    """A running head node of our own."""

    address: str
    environment: dict[str, str]

    def submit(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit` from the repository's root, as the README has it."""
        submit = [str(BIN / "ray"), "job", "submit", "--address", self.address, "--working-dir", ".", "--"]
        return subprocess.run(
            [*submit, *command], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray head with a token of its own, on free ports; ended with all its processes by its process group."""
    folder = tmp_path_factory.mktemp("cluster")
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
    }
    environment.pop("RAY_ADDRESS", None)
    (folder / "token").write_text("a" * 64, encoding="utf-8")
    gcs, dashboard, agent, client = free_ports(4)
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=8", f"--port={gcs}"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--ray-client-server-port={client}", "--min-worker-port=0", "--max-worker-port=0"]
    # Unix sockets allow about 100 characters of path, which pytest's own folders exceed.
    command += [f"--temp-dir=/tmp/ray-e2e-{os.getpid()}", "--object-store-memory=500000000"]
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        try:
            yield Cluster(_wait_for(head, f"http://127.0.0.1:{dashboard}", environment, folder / "log"), environment)
        finally:
            head.terminate()
            try:
                head.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()


def _wait_for(head: subprocess.Popen[bytes], address: str, environment: dict[str, str], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and head.poll() is None:
        listed = subprocess.run(
            [str(BIN / "ray"), "job", "list", "--address", address], env=environment, capture_output=True, check=False
        )
        if listed.returncode == 0:
            return address
        time.sleep(1)
    pytest.fail(f"the cluster did not start:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The demo, cut to minutes; absolute paths, because a submitted job runs in a copy of the repository."""
    folder = tmp_path_factory.mktemp("artefacts")
    target = prepare_demo_target(folder / "target")
    return [
        f"target.path={target}",
        f"cache.url={folder / 'cache'}",
        f"training.output={folder / 'run'}",
        "prompts.limit=12",
        "generation.sampling.max_new_tokens=24",
        "drafter.num_draft_layers=1",
        "drafter.markov_rank=8",
        "training.epochs=1",
        "training.global_batch_size=4",
        "training.micro_batch_size=2",
        "training.num_anchors=8",
    ]


def _value(overrides: list[str], key: str) -> Path:
    return Path(next(item.partition("=")[2] for item in overrides if item.startswith(f"{key}=")))


def test_submit_without_the_token_is_refused(cluster: Cluster) -> None:
    stranger = Cluster(cluster.address, {**cluster.environment, "RAY_AUTH_TOKEN_PATH": "/nonexistent"})
    assert stranger.submit("python", "-c", "pass").returncode != 0


def test_build_inspect_and_train_as_submitted_jobs(cluster: Cluster, overrides: list[str]) -> None:
    built = cluster.submit("python", "jobs/build_cache.py", "--config", CONFIG, *overrides)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-2000:]

    cache = _value(overrides, "cache.url")
    inspected = subprocess.run(
        [str(BIN / "cache_store"), "inspect", str(cache), "--json"], capture_output=True, text=True, check=False
    )
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)["samples"] == 12

    trained = cluster.submit("python", "jobs/train.py", "--config", CONFIG, *overrides)
    assert trained.returncode == 0, trained.stdout[-4000:] + trained.stderr[-2000:]
    run = _value(overrides, "training.output")
    assert (run / "drafter" / "model.safetensors").is_file()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3, "12 samples, one epoch, global batch 4"


def test_a_failing_job_fails_the_submission(cluster: Cluster, overrides: list[str]) -> None:
    wrong = [item for item in overrides if not item.startswith("target.path=")] + ["target.path=/no/such/model"]
    refused = cluster.submit("python", "jobs/build_cache.py", "--config", CONFIG, *wrong)
    assert refused.returncode != 0
    assert "/no/such/model" in refused.stdout
