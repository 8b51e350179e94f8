"""Ray for one job: join the cluster that the job was submitted to, or start an embedded one; and watch its work.

Ray's and the engines' own logs go to Ray's session folder, never to the job's output.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import ClusterSection
from pipeline.errors import BuildFailed

if TYPE_CHECKING:
    from ray.data import Dataset

_QUIET_LOGGERS = ("ray", "ray.data", "ray.llm", "vllm", "httpx")


@contextmanager
def ray_session(section: ClusterSection) -> Iterator[None]:
    """Within the block Ray is up. A Ray that the caller had already started is used and left running.

    With `section.address`, or inside a submitted job (Ray itself sets RAY_ADDRESS there), the cluster is joined;
    otherwise a Ray of `section.embedded_cpus` logical CPUs is started in this process and stopped at the end.
    """
    # Ray reads these two when it is imported. Without the first, a thread that outlives the session (after a stall or a
    # signal) would start another Ray behind our back; without the second, Ray's C++ side writes to the job's output.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray

    _silence()
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = section.address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **quiet)
    else:
        ray.init(
            address="local",  # never a cluster that happens to run on this machine
            num_cpus=section.embedded_cpus,
            object_store_memory=section.object_store_mb * 2**20,
            include_dashboard=False,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def quiet_start() -> Iterator[None]:
    """Around library calls that connect to Ray once more: they reset Ray's log level and announce themselves."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        _silence()


def _silence() -> None:
    import ray.data

    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def session_logs() -> str:
    """Where the logs of Ray's workers and engines are, for messages: below Ray's temporary folder."""
    import ray

    session = ray.get_runtime_context().get_session_name() if ray.is_initialized() else "session_latest"
    return f"<ray's temporary folder>/{session}/logs"


def has_accelerators() -> bool:
    """Whether the connected Ray has GPUs; on a CPU-only Ray the engines are given CPUs instead."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


_END = object()


def watch(
    dataset: Dataset, *, stage: str, stall_timeout_s: float, tick_s: float = 5.0
) -> Iterator[dict[str, Any] | None]:
    """Run a Ray Data graph and yield its rows as they come, and None whenever `tick_s` passed without one.

    Raises BuildFailed when no row came for `stall_timeout_s`, and whatever the graph itself raised.
    """
    rows: queue.Queue[Any] = queue.Queue()

    def consume() -> None:
        try:
            for row in dataset.iter_rows():
                rows.put(row)
            rows.put(_END)
        except BaseException as error:  # noqa: BLE001  handed over to the watching thread, which raises it
            rows.put(_Failed(error))

    # A daemon: after a stall nothing can wake it, and the process must still be able to end.
    threading.Thread(target=consume, daemon=True, name=f"consume-{stage}").start()
    silent = 0.0
    while True:
        wait = min(tick_s, stall_timeout_s - silent)
        try:
            item = rows.get(timeout=max(wait, 0.01))
        except queue.Empty:
            silent += wait
            if silent >= stall_timeout_s:
                raise BuildFailed(
                    f"{stage}: no row finished for {stall_timeout_s:.0f} s, the engine hangs or cannot start; "
                    f"see {session_logs()}; the same command continues"
                ) from None
            yield None
            continue
        if item is _END:
            return
        if isinstance(item, _Failed):
            raise item.error
        silent = 0.0
        yield item
