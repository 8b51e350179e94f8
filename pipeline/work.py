"""Work for Ray Data in pieces of known size, and what a failed piece says about trying again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from cache_store.errors import CacheError
from pipeline.errors import BuildFailed, PipelineError

if TYPE_CHECKING:
    from ray.data import Dataset

Piece = TypeVar("Piece")


def read_pieces(
    pieces: Sequence[Sequence[Piece]], make: Callable[[Sequence[Piece]], pa.Table], *, concurrency: int
) -> Dataset:
    """A lazy Dataset with exactly one block per piece; at most `concurrency` pieces are being made at a time."""
    import ray

    from pipeline.work_source import WorkSource  # it needs Ray at import; ray_session must come first

    count = len(pieces)
    return ray.data.read_datasource(
        WorkSource(pieces, make),
        concurrency=min(concurrency, count),
        override_num_blocks=count,  # else Ray splits the blocks of a small job into crumbs
    )


def split(items: Sequence[Piece], size: int) -> list[Sequence[Piece]]:
    """Consecutive pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def own_error(error: BaseException) -> CacheError | PipelineError | None:
    """The typed error of ours that a failed Ray task carries, if there is one: trying again will not help it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, CacheError | PipelineError):
            # Ray's wrapper is an instance of our class as well, but its text is the remote traceback.
            wrapped = getattr(current, "cause", None)
            return wrapped if isinstance(wrapped, CacheError | PipelineError) else current
        current = getattr(current, "cause", None) or current.__cause__
    return None


def early_end(stage: str, error: Exception) -> str:
    """Why a pass over missing rows ended early, when going over what is missing may help.

    Raises BuildFailed when it cannot: for a stall, and for a typed error of ours inside a failed Ray task.
    """
    if isinstance(error, BuildFailed):
        raise error
    if (own := own_error(error)) is not None:
        raise BuildFailed(f"{stage}: {own}; the same command continues") from error
    return one_line(error)


def one_line(error: BaseException) -> str:
    """The last line of what a failed Ray task or actor says: the remote traceback's own message."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(cause).__name__
