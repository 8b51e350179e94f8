"""Small caches for tests: random samples with states of a realistic spread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cache_store import codec
from cache_store.calibration import calibrate, commit_calibration
from cache_store.errors import AlreadyExists
from cache_store.ledger import seal
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import Storage
from cache_store.writer import CacheWriter, create_cache

IDENTITY = {"target": "toy", "weights": "w0", "template": "t0", "temperature": 0.7, "seed": 1, "max_length": 64}


DEFAULTS: dict[str, Any] = {"format": "parquet"}
"""The fixture `both_formats` exchanges it."""


def make_spec(**changes: Any) -> CacheSpec:
    settings: dict[str, Any] = {
        **DEFAULTS,
        "layer_ids": (0, 2),
        "hidden_size": 16,
        "num_target_layers": 5,
        "vocab_size": 100,
        "codec": "bss1",
        "last_hidden": "needed",
        "shard_bytes": 1 << 20,
        "identity": dict(IDENTITY),
    }
    return CacheSpec(**{**settings, **changes})


def make_states(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bf16 bits of heavy-tailed values with a scale per channel, as a transformer's residual stream has."""
    scale = np.exp(0.5 * rng.standard_normal(shape[-1]))
    return codec.to_bits((rng.standard_t(5, size=shape) * scale).astype(np.float32))


def make_sample(spec: CacheSpec, number: int, *, tokens: int | None = None, **changes: Any) -> TargetSample:
    rng = np.random.default_rng(number)
    length = tokens or int(rng.integers(4, 20))
    mask = np.zeros(length, dtype=bool)
    mask[length // 3 :] = True
    values: dict[str, Any] = {
        "sample_id": f"s{number:04d}",
        "input_ids": rng.integers(0, spec.vocab_size, length, dtype=np.int32),
        "loss_mask": mask,
        "hidden_states": make_states(rng, spec.num_layers, length, spec.hidden_size),
        "last_hidden_state": make_states(rng, length, spec.hidden_size),
        "metadata": {"domain": "math", "finish_reasons": ["stop"]},
    }
    return TargetSample(**{**values, **changes})


def build_cache(
    storage: Storage, spec: CacheSpec, count: int, *, sealed: bool = True, **kwargs: Any
) -> list[TargetSample]:
    create_cache(storage, spec)
    samples = [make_sample(spec, number, **kwargs) for number in range(count)]
    if spec.calibrated:
        commit_calibration(storage, spec, calibrate(spec, samples))
    with CacheWriter(storage, spec) as writer:
        for sample in samples:
            writer.write(sample)
    if sealed:
        seal(storage, expected_ids=[sample.sample_id for sample in samples])
    return samples


def race_to_put(storage: Storage, name: str, racers: int) -> list[int]:
    """Writers that start together, each putting its own number under `name` if absent: the numbers of the losers."""
    lost: list[int] = []
    barrier = threading.Barrier(racers)

    def race(number: int) -> None:
        barrier.wait()
        try:
            storage.put(name, b"%d" % number, if_absent=True)
        except AlreadyExists:
            lost.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lost
