"""The target answers every user turn anew: one Ray Data pass per turn, resumed by the set of ids still missing.

read pending prompts -> render and tokenise with the target's template -> engine -> commit `responses/`.
An engine is any function from Dataset to Dataset (engines/vllm.py gives the real one). It gets the columns of
turns.REQUEST_SCHEMA and returns `sample_id`, `turn`, `carry`, `prompt_token_ids`, `generated_tokens`, and for a row
that it could not do `__inference_error__`.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cache_store.errors import CacheError
from cache_store.ledger import Ledger
from pipeline.cluster import watch
from pipeline.config import Config
from pipeline.errors import BuildFailed, PipelineError
from pipeline.prompt_store import PromptIndex
from pipeline.responses import Place, TurnIndex, index_turn
from pipeline.telemetry import Progress
from pipeline.turns import Pending, Recipe, render_requests, to_answers, unit_id, write_answers
from pipeline.work import early_end, read_pieces, split

if TYPE_CHECKING:
    from ray.data import Dataset

Engine = Callable[["Dataset"], "Dataset"]


@dataclass(slots=True)
class RegenerateReport:
    """Totals of this run."""

    answers: int = 0
    generated_tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0


def regenerate(config: Config, recipe: Recipe, index: PromptIndex, engine: Callable[[], Engine]) -> RegenerateReport:
    """Answer every turn that has no response and no reject yet; `engine` is called once work exists.

    Raises BuildFailed when rows are still missing after `generation.max_attempts` passes over a turn, and on a stall.
    """
    report = RegenerateReport()
    made: Engine | None = None
    last_error: str | None = None
    for turn in range(max(index.turns)):
        for attempt in range(config.generation.max_attempts + 1):
            pending, total = find_pending(recipe, index, turn)
            if not pending:
                break
            if attempt == config.generation.max_attempts:
                raise BuildFailed(
                    f"regenerate: {len(pending)} of {total} answers of turn {turn} are missing after {attempt} passes; "
                    f"the last one ended with: {last_error or 'no error'}; the same command continues"
                )
            made = made or engine()
            last_error = _run_pass(config, recipe, made, (turn, pending, total), report)
    return report


def find_pending(recipe: Recipe, index: PromptIndex, turn: int) -> tuple[list[Pending], int]:
    """The turn's rows without a response, and how many rows the turn has in all."""
    rejected = Ledger(recipe.storage).rejected().keys()
    current = index_turn(recipe.storage, turn)
    previous = index_turn(recipe.storage, turn - 1) if turn else None
    pending: list[Pending] = []
    total = 0
    for sample_id, turns, place in zip(index.ids, index.turns, index.places, strict=True):
        if turns <= turn or not _continues(sample_id, previous):
            continue
        total += 1
        if sample_id in current.places or unit_id(sample_id, turn, turns, recipe.history) in rejected:
            continue
        pending.append(Pending(place, previous.places[sample_id] if previous else None))
    return pending, total


def _continues(sample_id: str, previous: TurnIndex | None) -> bool:
    return previous is None or (sample_id in previous.places and sample_id not in previous.ended)


def _run_pass(
    config: Config, recipe: Recipe, engine: Engine, work: tuple[int, list[Pending], int], report: RegenerateReport
) -> str | None:
    """One pass over a turn; returns what ended it early, if anything did."""
    import ray

    turn, pending, total = work
    settings = config.generation
    stage = "regenerate" if turn == 0 else f"regenerate {turn + 1}"
    progress = Progress(stage, total, already=total - len(pending), unit="answers")
    pieces = split(pending, settings.batch_size)
    dataset = read_pieces(pieces, partial(render_requests, recipe, turn), concurrency=2 * settings.num_engines)
    answers = engine(dataset).map_batches(to_answers, batch_size=None, batch_format="pyarrow")
    written = answers.map_batches(
        partial(write_answers, recipe),
        batch_size=settings.rows_per_file,
        batch_format="pyarrow",
        concurrency=settings.num_engines,
    )
    try:
        for row in watch(written, stage=stage, stall_timeout_s=settings.stall_timeout_s):
            if row is None:
                progress.update(detail="" if progress.done > progress.already else "starting the engine")
                continue
            report.answers += row["answers"]
            report.generated_tokens += row["tokens"]
            report.truncated += row["truncated"]
            progress.update(row["answers"], failed=row["failed"], detail=f"{report.generated_tokens:,} tokens")
    except (ray.exceptions.RayError, CacheError, PipelineError) as error:
        reason = early_end(stage, error)
        progress.finish(f"pass ended early ({reason}), going over what is missing")
        return reason
    finally:
        report.seconds += progress.record().elapsed
    progress.finish(f"{report.generated_tokens:,} tokens")
    return None


def sample_places(recipe: Recipe, index: PromptIndex, rejected: Set[str]) -> dict[str, Place]:
    """For every sample that is to be extracted: where the response that holds all of it is."""
    found: dict[str, Place] = {}
    for turn in range(max(index.turns)):
        current = index_turn(recipe.storage, turn)
        for sample_id, turns in zip(index.ids, index.turns, strict=True):
            name = unit_id(sample_id, turn, turns, recipe.history)
            if sample_id in current.places and sample_id not in current.unanswered and name not in rejected:
                found[name] = current.places[sample_id]  # a later turn's row holds the earlier ones
    return found
