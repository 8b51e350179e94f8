"""The Ray half of an evaluation: actors that decode chunks of tasks and stream their results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.acceptance import TRAINED, DecodeRow, RoundRow
from pipeline.cluster import has_accelerators, session_logs
from pipeline.config_evaluation import EvaluationSection
from pipeline.errors import EvaluationFailed
from pipeline.eval_actor import EvalActor, EvalRecipe, EvalTask, TaskResult, count_answers
from pipeline.held_out import make_chunks
from pipeline.telemetry import Progress
from pipeline.work import own_error

_TICK_S = 5.0
# Idle OpenMP threads sleep instead of spinning: on a machine that does anything else, spinning threads hold up every
# one of a forward's hundreds of small operations (measured on 2 busy cores: 0.4 s instead of 0.1 s per token).
_ACTOR_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(slots=True)
class Measured:
    """Everything that the actors measured, in an order that does not depend on which was faster."""

    rounds: list[RoundRow] = field(default_factory=list)
    decodes: list[DecodeRow] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    def add(self, part: TaskResult) -> None:
        """Take a part in."""
        self.rounds += part.rounds
        self.decodes += part.decodes
        self.rejected += part.rejected

    def sort(self, tasks: Sequence[EvalTask]) -> None:
        """Order of the tasks, then turn, drafter and round."""
        place = {(t.prompt.sample_id, t.temperature): i for i, t in enumerate(tasks)}

        def key(row: RoundRow | DecodeRow) -> tuple[int, int, str]:
            return place[row.prompt_id, row.temperature], row.turn, row.drafter

        self.rounds.sort(key=lambda row: (*key(row), row.round))
        self.decodes.sort(key=key)
        self.rejected.sort()


def decode_tasks(
    recipe: EvalRecipe, section: EvaluationSection, tasks: Sequence[EvalTask], progress_file: Path
) -> Measured:
    """Decode the tasks on `num_actors` actors; Ray must be up.

    Raises EvaluationFailed when an actor dies or nothing finishes for `stall_timeout_s`.
    """
    import ray

    gpus = section.gpus_per_actor if has_accelerators() else 0.0
    recipe = recipe if gpus else replace(recipe, device="cpu")
    remote: Any = ray.remote(EvalActor)
    remote = remote.options(
        num_cpus=section.cpus_per_actor, num_gpus=gpus, runtime_env={"env_vars": dict(_ACTOR_ENVIRONMENT)}
    )
    waiting = make_chunks(tasks, num_actors=section.num_actors, batch_size=section.batch_size)[::-1]
    actors = [remote.remote(recipe) for _ in range(min(section.num_actors, len(waiting)))]
    drafters = 1 + (recipe.untrained_seed is not None)
    progress = Progress("evaluate", count_answers(tasks, drafters), unit="answers", log_file=progress_file)
    watch = _Watch(progress, section.stall_timeout_s)
    streams: dict[Any, Any] = {}
    try:
        while waiting or streams:
            for actor in [actor for actor in actors if actor not in streams.values()]:
                if waiting:
                    streams[actor.run.options(num_returns="streaming").remote(waiting.pop())] = actor
            for stream in watch.ready(list(streams)):
                part = _next_part(stream)
                if part is None:
                    del streams[stream]
                else:
                    watch.add(part)
    finally:
        for actor in actors:
            ray.kill(actor)
    progress.finish(watch.detail)
    watch.measured.sort(tasks)
    return watch.measured


@dataclass(slots=True)
class _Watch:
    """What came in so far, and how long nothing has."""

    progress: Progress
    stall_timeout_s: float
    measured: Measured = field(default_factory=Measured)
    silent_s: float = 0.0

    @property
    def detail(self) -> str:
        """τ of the trained drafter so far."""
        emitted = [row.emitted for row in self.measured.rounds if row.drafter == TRAINED]
        if not emitted:
            return "loading the target, first answers"
        return f"τ {sum(emitted) / len(emitted):.2f} over {len(emitted):,} rounds"

    def add(self, part: TaskResult) -> None:
        """Take a part in and show it."""
        self.measured.add(part)
        self.silent_s = 0.0
        self.progress.update(part.done, detail=self.detail)

    def ready(self, streams: list[Any]) -> list[Any]:
        """Streams with a part or an end; none after a quiet tick, which shows a progress line."""
        import ray

        ready, _ = ray.wait(streams, timeout=_TICK_S, fetch_local=False)
        if not ready:
            self.silent_s += _TICK_S
            self.progress.update(detail=self.detail)
            if self.silent_s >= self.stall_timeout_s:
                raise EvaluationFailed(
                    f"evaluate: no answer finished for {self.silent_s:.0f} s, the actors hang or cannot be scheduled; "
                    f"see {session_logs()}"
                )
        return ready


def _next_part(stream: Any) -> TaskResult | None:
    """The stream's next part; None at its end."""
    import ray

    try:
        return ray.get(next(stream))
    except StopIteration:
        return None
    except ray.exceptions.RayError as error:
        known = own_error(error)
        if known is not None:
            raise known from error
        line = str(error).strip().splitlines()[-1]
        raise EvaluationFailed(f"evaluate: an actor failed: {line}; see {session_logs()}") from error
