"""Hidden states for every answered conversation: actors run the target, write shards themselves, emit only counts.

One call of an actor turns `extraction.samples_per_task` responses into committed shards before it returns, so a
repeated call repeats whole samples (sealing reads each id once) and nothing is ever half open between calls.
Hidden states never travel through Ray's object store.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from cache_store.errors import CacheError, SampleRejected
from cache_store.estimate import size_text
from cache_store.ledger import Ledger, Reject
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import Storage
from cache_store.writer import CacheWriter
from pipeline.cluster import watch
from pipeline.config import Config, TargetSection
from pipeline.engines.hf import HiddenStateExtractor, SequenceStates, load_target
from pipeline.errors import BuildFailed, PipelineError
from pipeline.responses import Place, Response, load_responses
from pipeline.telemetry import Progress
from pipeline.work import early_end, read_pieces, split

_SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "spans": pa.list_(pa.list_(pa.int32())),
        "metadata": pa.string(),
    }
)
# Samples that may wait for the writer: a bounded staging area, so a slow disk slows the forward down.
_MAX_WAITING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractRecipe:
    """What an extraction actor needs; travels to the workers."""

    storage: Storage
    spec: CacheSpec
    target: TargetSection
    tokens_per_batch: int
    num_actors: int


@dataclass(slots=True)
class ExtractReport:
    """Totals of this run. Seconds are sums over actors: forward, writing, and the forward waiting for the writer."""

    samples: int = 0
    tokens: int = 0
    rejected: int = 0
    bytes: int = 0
    forward_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0
    seconds: float = 0.0


# --- the driver ------------------------------------------------------------------------------------------------------


def extract(config: Config, recipe: ExtractRecipe, places: dict[str, Place]) -> ExtractReport:
    """Commit every sample of `places` (sample id -> its response) that is neither committed nor rejected yet.

    Raises BuildFailed when samples are still missing after `extraction.max_attempts` passes, and on a stall.
    """
    report = ExtractReport()
    ledger = Ledger(recipe.storage)
    last_error: str | None = None
    for attempt in range(config.extraction.max_attempts + 1):
        pending = ledger.pending(places)
        if not pending:
            break
        if attempt == config.extraction.max_attempts:
            raise BuildFailed(
                f"extract: {len(pending)} of {len(places)} samples are missing after {attempt} passes "
                f"(first: {pending[0]}); the last one ended with: {last_error or 'no error'}; "
                "the same command continues"
            )
        work = [(name, places[name]) for name in pending]
        last_error = _run_pass(config, recipe, work, report, len(places))
    return report


def _run_pass(
    config: Config, recipe: ExtractRecipe, work: list[tuple[str, Place]], report: ExtractReport, total: int
) -> str | None:
    """One pass; returns what ended it early, if anything did."""
    import ray

    settings = config.extraction
    progress = Progress("extract", total, already=total - len(work))
    pieces = split(work, settings.samples_per_task)
    make = partial(load_piece, recipe.storage)
    dataset = read_pieces(pieces, make, concurrency=2 * settings.num_actors).map_batches(
        ExtractActor,
        fn_constructor_args=(recipe,),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=settings.num_actors),
        num_cpus=settings.cpus_per_actor,
        num_gpus=settings.gpus_per_actor,
    )
    try:
        for row in watch(dataset, stage="extract", stall_timeout_s=settings.stall_timeout_s):
            if row is None:
                progress.update(detail="" if progress.done > progress.already else "loading the target")
                continue
            for name in ("samples", "tokens", "rejected", "bytes", "forward_s", "write_s", "wait_s"):
                setattr(report, name, getattr(report, name) + row[name])
            progress.update(row["samples"], failed=row["rejected"], detail=_detail(report))
    except (ray.exceptions.RayError, CacheError, PipelineError) as error:
        reason = early_end("extract", error)
        progress.finish(f"pass ended early ({reason}), going over what is missing")
        return reason
    finally:
        report.seconds += progress.record().elapsed
    progress.finish(_detail(report))
    return None


def _detail(report: ExtractReport) -> str:
    return f"{report.tokens:,} tokens, {size_text(report.bytes)} written"


# --- in the workers --------------------------------------------------------------------------------------------------


def load_piece(storage: Storage, piece: Sequence[tuple[str, Place]]) -> pa.Table:
    """The responses of a piece of work as rows: id, token ids, spans, metadata."""
    responses = load_responses(storage, [place for _, place in piece])
    rows = [
        {
            "sample_id": name,
            "token_ids": response.token_ids,
            "spans": response.spans,
            "metadata": json.dumps(_metadata(response)),
        }
        for (name, _), response in zip(piece, responses, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _metadata(response: Response) -> dict[str, Any]:
    return {
        "domain": response.domain,
        "finish_reasons": response.finish_reasons,
        "turns_asked": response.turns,
        "ended": response.ended,
    }


class ExtractActor:
    """Holds the target; each call commits one block of samples and returns one row of counts."""

    def __init__(self, recipe: ExtractRecipe) -> None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            # Ray gives a process as many threads as it reserved CPUs; extraction has the machine to itself.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // recipe.num_actors))
        model = load_target(recipe.target, device, with_head=False)
        self._recipe = recipe
        self._extractor = HiddenStateExtractor(model, recipe.spec.layer_ids, tokens_per_batch=recipe.tokens_per_batch)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Extract, write and commit every sample of the block; bad samples go to the rejects."""
        counts = extract_block(self._recipe, self._extractor, table)
        return pa.Table.from_pylist([counts])


@dataclass(slots=True)
class _Block:
    """One call's bookkeeping."""

    rows: list[dict[str, Any]]
    rejects: list[Reject] = field(default_factory=list)
    written: int = 0
    tokens: int = 0
    write_s: float = 0.0
    wait_s: float = 0.0


def extract_block(recipe: ExtractRecipe, extractor: HiddenStateExtractor, table: pa.Table) -> dict[str, Any]:
    """Commit a block of samples. A thread writes while the next forward runs. Returns the counts of the call."""
    block = _Block(table.to_pylist())
    started = time.perf_counter()
    with CacheWriter(recipe.storage, recipe.spec) as writer, ThreadPoolExecutor(max_workers=1) as thread:
        waiting: deque[Future[None]] = deque()
        for states in extractor.extract([row["token_ids"] for row in block.rows]):
            if len(waiting) >= _MAX_WAITING:
                _wait(waiting.popleft(), block)
            waiting.append(thread.submit(_write, writer, block, states))
        while waiting:
            _wait(waiting.popleft(), block)
        forwarded = time.perf_counter() - started - block.wait_s
        records = writer.close()
    Ledger(recipe.storage).reject(block.rejects)
    return {
        "samples": block.written,
        "tokens": block.tokens,
        "rejected": len(block.rejects),
        "bytes": sum(record.num_bytes for record in records),
        "forward_s": forwarded,
        "write_s": block.write_s,
        "wait_s": block.wait_s,
    }


def _wait(future: Future[None], block: _Block) -> None:
    started = time.perf_counter()
    future.result()
    block.wait_s += time.perf_counter() - started


def _write(writer: CacheWriter, block: _Block, states: SequenceStates) -> None:
    started = time.perf_counter()
    row = block.rows[states.index]
    try:
        writer.write(to_sample(row, states))
        block.written += 1
        block.tokens += len(row["token_ids"])
    except SampleRejected as error:
        block.rejects.append(Reject(sample_id=row["sample_id"], stage="extract", reason=error.reason, source=None))
    finally:
        block.write_s += time.perf_counter() - started


def to_sample(row: dict[str, Any], states: SequenceStates) -> TargetSample:
    """A stored sample from a response row and its states; supervised are exactly the generated tokens."""
    input_ids = np.asarray(row["token_ids"], dtype=np.int32)
    loss_mask = np.zeros(len(input_ids), dtype=bool)
    for start, end in row["spans"]:
        loss_mask[start:end] = True
    return TargetSample(
        sample_id=row["sample_id"],
        input_ids=input_ids,
        loss_mask=loss_mask,
        hidden_states=states.hidden_states,
        last_hidden_state=states.last_hidden_state,
        metadata=json.loads(row["metadata"]),
    )
