"""How many drafts of each request to verify (DSpark §4, Algorithm 1): pure functions of confidences and costs.

A draft survives with a_{r,j} = Π_{i≤j} c_{r,i}. Drafts are admitted by falling a while Θ = τ / T(B) grows, with
τ = Σ_r (1 + Σ_{j≤l_r} a_{r,j}) expected tokens, B = Σ_r (1 + l_r) tokens in the step and T(B) = 1 / SPS(B) its seconds.
Stopping at the first drop, and never reading a confidence behind the draft in question, keeps decoding lossless:
whether a draft is verified may depend on what stands before it, never on itself or what follows (Appendix A).

Confidences are probabilities, float32 or float64, C-contiguous. A confidence of 0 is never admitted. One that is no
probability (NaN, below 0, above 1) says nothing: its draft and all behind it stay out, and Schedule.invalid counts it.
Equal survivals are admitted by request, then by position. Legend: R requests, K draft positions, B tokens per step.

The loops are compiled at the first call for a dtype (seconds); warm_up() does it beforehand. Measured by
`python benchmarks/scheduler.py --json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from model.decoding.cost_table import CostTable
from model.errors import DecodingError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's decision."""

    lengths_R: np.ndarray
    """int64 [R]: drafts to verify per request."""
    tokens: int
    """B: tokens in the step, one per request plus the drafts."""
    expected_tokens: float
    """τ: tokens that the step is expected to commit."""
    tokens_per_second: float
    """Θ of the decision."""
    invalid: int
    """Requests cut short by a confidence that is no probability, among those the decision looked at."""


def schedule(
    confidences_RK: np.ndarray, table: CostTable, limits_R: np.ndarray | None = None, *, overhead_seconds: float = 0.0
) -> Schedule:
    """Algorithm 1 for a batch, with the early stop.

    `limits_R` int64 [R] bounds each request's drafts: with m tokens left to generate no more than m - 1 can be of use;
    None allows all K. `overhead_seconds` is the part of a step that does not depend on the decision, for instance
    drafting: Θ = τ / (T(B) + overhead). No step grows beyond the table's largest B. Raises DecodingError for an empty
    or oversized batch and for arrays of the wrong shape.
    """
    requests = _check(confidences_RK, limits_R)
    base = _check_base(requests, table)
    limits_R = _all_positions(confidences_RK) if limits_R is None else limits_R
    lengths_R, admitted, _, total, rate, invalid = _kernels().admit_batch(
        confidences_RK, table.seconds_B, overhead_seconds, limits_R, base, table.max_tokens, True
    )
    return Schedule(lengths_R, base + admitted, total, rate, invalid)


def schedule_one(
    confidences_K: np.ndarray, table: CostTable, limit: int | None = None, overhead_seconds: float = 0.0
) -> int:
    """Algorithm 1 for one request alone: the number of its drafts to verify, 0 to min(K, limit).

    Takes about a microsecond, so it checks nothing beyond what indexing needs.
    """
    size = confidences_K.shape[0]
    return _kernels().admit_one(
        confidences_K, table.seconds_B, overhead_seconds, size if limit is None or limit > size else limit
    )


def best_capacity(
    confidences_RK: np.ndarray,
    table: CostTable,
    limits_R: np.ndarray | None = None,
    *,
    requests: int | None = None,
    overhead_seconds: float = 0.0,
) -> Schedule:
    """The capacity of the asynchronous mode: the highest Θ over ALL prefixes of the sorted drafts, no early stop.

    Lossless only on confidences that are older than the round it is used for (the paper takes those of two rounds
    ago, when this round's step is being prepared): the search reads every confidence it is given. `requests` is the
    size of the batch to come, when it differs from R. The result's lengths are those of the highest point, its
    `tokens - requests` the capacity for `admit_top`.
    """
    rows = _check(confidences_RK, limits_R)
    base = _check_base(rows if requests is None else requests, table)
    limits_R = _all_positions(confidences_RK) if limits_R is None else limits_R
    kernel, seconds_B = _kernels().admit_batch, table.seconds_B
    _, _, count, total, rate, _ = kernel(
        confidences_RK, seconds_B, overhead_seconds, limits_R, base, table.max_tokens, False
    )
    lengths_R, _, _, _, _, invalid = kernel(confidences_RK, seconds_B, overhead_seconds, limits_R, base, count, False)
    return Schedule(lengths_R, base + count, total, rate, invalid)


def admit_top(
    confidences_RK: np.ndarray, capacity: int, table: CostTable, limits_R: np.ndarray | None = None
) -> Schedule:
    """The asynchronous mode's second half: the `capacity` drafts with the highest survival of this round.

    A draft's rank depends on no later draft of its request, so this is as lossless as Algorithm 1, provided that
    the capacity came from earlier rounds.
    """
    base = _check_base(_check(confidences_RK, limits_R), table)
    limits_R = _all_positions(confidences_RK) if limits_R is None else limits_R
    if capacity < 0:
        raise DecodingError(f"capacity is {capacity}; wanted 0 or more drafts")
    lengths_R, admitted, *_, invalid = _kernels().admit_batch(
        confidences_RK, table.seconds_B, 0.0, limits_R, base, capacity, False
    )
    survival_RK = np.cumprod(confidences_RK, axis=1, dtype=np.float64)
    taken_RK = np.arange(confidences_RK.shape[1]) < lengths_R[:, None]
    total = base + float(survival_RK[taken_RK].sum())
    return Schedule(lengths_R, base + admitted, total, total / float(table.seconds_B[base + admitted - 1]), invalid)


def cost_schedule(table: CostTable, *, overhead_seconds: float = 0.0) -> Callable[[Tensor], list[int]]:
    """Algorithm 1 as a BatchDecoder's `schedule`: confidences [B,K] to the number of drafts to verify per row."""

    def count(confidences_BK: Tensor) -> list[int]:
        confidences = confidences_BK.float().cpu().contiguous().numpy()
        lengths: list[int] = schedule(confidences, table, overhead_seconds=overhead_seconds).lengths_R.tolist()
        return lengths

    return count


def warm_up(dtype: type[np.floating] = np.float32) -> None:
    """Compile for confidences of `dtype` now, so that no request waits for it."""
    table = CostTable(
        device="", target="", kind="synthetic", context_tokens=0, tokens=(1, 2), steps_per_second=(1.0, 1.0)
    )
    confidences = np.full((1, 1), 0.5, dtype=dtype)
    schedule(confidences, table)
    schedule_one(confidences[0], table)


@cache
def _kernels() -> ModuleType:
    """numba, imported when the first decision is asked for."""
    from model.decoding import scheduler_kernels

    return scheduler_kernels


def _all_positions(confidences_RK: np.ndarray) -> np.ndarray:
    return np.full(confidences_RK.shape[0], confidences_RK.shape[1], dtype=np.int64)


def _check(confidences_RK: np.ndarray, limits_R: np.ndarray | None) -> int:
    """The number of requests. Raises DecodingError for anything else than [R,K] confidences and limits of 0..K."""
    if confidences_RK.ndim != 2 or confidences_RK.dtype.kind != "f" or not confidences_RK.flags.c_contiguous:
        raise DecodingError(
            f"confidences are {confidences_RK.dtype} {list(confidences_RK.shape)}; wanted contiguous float [R,K]"
        )
    requests, positions = confidences_RK.shape
    if limits_R is not None and (
        limits_R.shape != (requests,) or limits_R.dtype != np.int64 or (requests and limits_R.max() > positions)
    ):
        raise DecodingError(
            f"limits are {limits_R.dtype} {list(limits_R.shape)} up to {limits_R.max(initial=0)}; wanted int64 "
            f"[{requests}] up to {positions}"
        )
    return requests


def _check_base(requests: int, table: CostTable) -> int:
    if not 1 <= requests <= table.max_tokens:
        raise DecodingError(
            f"a step of {requests} requests: the cost table of {table.target} on {table.device} covers 1 to "
            f"{table.max_tokens} tokens; measure a larger table, or run fewer requests at a time"
        )
    return requests
