"""The scheduler's loops, compiled by numba when first called. Imported by scheduler.py alone, and only when needed.

Legend: R requests, K draft positions, B tokens per step.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=False)
def admit_one(confidences_K, seconds_B, overhead, limit):  # type: ignore[no-untyped-def]
    """Algorithm 1 for one request: its drafts in order, up to the first that does not raise the objective."""
    length, survival, total = 0, 1.0, 1.0
    best = total / (seconds_B[0] + overhead)
    limit = min(limit, seconds_B.shape[0] - 1)
    while length < limit:
        confidence = float(confidences_K[length])
        if not 0.0 < confidence <= 1.0:
            break
        survival *= confidence
        total += survival
        rate = total / (seconds_B[length + 1] + overhead)
        if not rate > best:
            break
        best = rate
        length += 1
    return length


@njit(cache=False)
def _sift_down(keys, ids, start, size):  # type: ignore[no-untyped-def]
    """Let the entry at `start` sink: larger keys stand higher, equal keys by smaller id."""
    key, request, at = keys[start], ids[start], start
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (keys[right] > keys[child] or (keys[right] == keys[child] and ids[right] < ids[child])):
            child = right
        if keys[child] < key or (keys[child] == key and ids[child] > request):
            break
        keys[at], ids[at] = keys[child], ids[child]
        at = child
    keys[at], ids[at] = key, request


@njit(cache=False)
def _first_drafts(confidences_RK, limits_R, keys, ids):  # type: ignore[no-untyped-def]
    """Fill the heap with the first draft of each request; its size, and how many first values are no probability."""
    size, invalid = 0, 0
    for request in range(confidences_RK.shape[0]):
        if limits_R[request] < 1:
            continue
        confidence = float(confidences_RK[request, 0])
        if 0.0 < confidence <= 1.0:
            keys[size], ids[size] = confidence, request
            size += 1
        elif confidence != 0.0:
            invalid += 1
    for start in range(size // 2 - 1, -1, -1):
        _sift_down(keys, ids, start, size)
    return size, invalid


@njit(cache=False)
def admit_batch(  # type: ignore[no-untyped-def]
    confidences_RK, seconds_B, overhead, limits_R, base, capacity, stop_at_drop
):
    """Admit drafts of all requests by falling survival, at most `capacity`; `base` tokens are in the step anyway.

    A heap holds the next draft of each request, so a draft's confidence is not even read before the draft in front
    of it was admitted: the decision cannot depend on later tokens. Returns the lengths [R], the number of drafts
    admitted, the number at the objective's highest point, their expected tokens and rate, and how many requests were
    ended by a value that is no probability.
    """
    requests = confidences_RK.shape[0]
    lengths = np.zeros(requests, np.int64)
    keys, ids = np.empty(requests, np.float64), np.empty(requests, np.int64)
    size, invalid = _first_drafts(confidences_RK, limits_R, keys, ids)
    total = float(base)
    best, best_total, best_count = total / (seconds_B[base - 1] + overhead), total, 0
    capacity = min(capacity, seconds_B.shape[0] - base)
    admitted = 0
    while size > 0 and admitted < capacity:
        survival, request = keys[0], ids[0]
        total += survival
        rate = total / (seconds_B[base + admitted] + overhead)
        if rate > best:
            best, best_total, best_count = rate, total, admitted + 1
        elif stop_at_drop:
            break
        admitted += 1
        lengths[request] += 1
        position, survival_next = lengths[request], 0.0
        if position < limits_R[request]:
            confidence = float(confidences_RK[request, position])
            if 0.0 <= confidence <= 1.0:
                survival_next = survival * confidence
            else:
                invalid += 1
        if survival_next > 0.0:
            keys[0] = survival_next
        else:
            size -= 1
            keys[0], ids[0] = keys[size], ids[size]
        if size > 1:
            _sift_down(keys, ids, 0, size)
    return lengths, admitted, best_count, best_total, best, invalid
