"""The order of samples: pure functions of (seed, epoch, number of samples), sliced by ranks (design.md §4.3).

Step s of global batch size G takes the positions [sG, (s+1)G) of the concatenated epochs, so which samples enter
which optimizer step does not depend on the number of workers, and a resumed run needs only the step number.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cache_store.errors import CacheError

_MASK64 = (1 << 64) - 1


def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Permutation of 0..n-1 for one epoch, int64 [n].

    Sorts raw Philox words, because NumPy promises stable raw streams over its versions but not a stable
    `Generator.permutation`.
    """
    words = np.random.Philox(key=(seed & _MASK64) | ((epoch & _MASK64) << 64)).random_raw(n)
    return np.argsort(words, kind="stable")


@lru_cache(maxsize=4)
def _cached_order(seed: int, epoch: int, n: int) -> np.ndarray:
    order = epoch_order(seed, epoch, n)
    order.setflags(write=False)
    return order


def step_samples(seed: int, n: int, global_batch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of one optimizer step: (epochs int64 [G], positions int64 [G]).

    Every sample stands once in each epoch; the tail of an epoch that does not fill a batch is carried into the next.
    Raises CacheError when there are no samples, or the batch or step is out of range.
    """
    if n <= 0 or global_batch <= 0 or step < 0:
        raise CacheError(f"no step {step} of {global_batch} samples can be drawn from a cache of {n} samples")
    places = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(places, n)
    positions = np.empty(global_batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        positions[chosen] = _cached_order(seed, int(epoch), n)[offsets[chosen]]
    return epochs, positions


def rank_slice(global_batch: int, rank: int, world_size: int) -> range:
    """The places of a global batch that one rank takes: contiguous, sizes differ by one at most."""
    if not 0 <= rank < world_size:
        raise CacheError(f"rank {rank} is not one of {world_size} ranks")
    return range(rank * global_batch // world_size, (rank + 1) * global_batch // world_size)
