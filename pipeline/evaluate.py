"""Evaluation: accepted length by real speculative decoding of held-out prompts, from the exported drafter.

Ray actors decode (eval_actor), pure functions summarise (acceptance), and this file connects and checks them.
Nothing is resumed: an evaluation is short, and its times belong to one run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from cache_store.ledger import Reject
from model.config import DrafterConfig
from pipeline.acceptance import DecodeRow, RoundRow, check_greedy, summarise, summarise_speed
from pipeline.cluster import has_accelerators, ray_session, session_logs
from pipeline.config import Config, dump_config
from pipeline.drafter_check import check_drafter, expected_tau
from pipeline.errors import ConfigError, EvaluationFailed
from pipeline.eval_actor import NO_DOMAIN, TRAINED, EvalActor, EvalRecipe, EvalTask, TaskResult, default_threads
from pipeline.identity import CheckedTarget, check_target
from pipeline.prompts import Prompt, PromptCounts, read_prompts
from pipeline.report import EvaluationReport, TauAgreement, markdown, print_report
from pipeline.telemetry import Progress
from pipeline.work import own_error

ROUNDS, DECODES, REPORT_JSON, REPORT_MARKDOWN = "rounds.parquet", "decodes.parquet", "report.json", "report.md"
DRAFTER = "drafter"
_SHOWN_PROMPTS = 3
_TICK_S = 5.0
# Idle OpenMP threads sleep instead of spinning: on a machine that does anything else, spinning threads hold up every
# one of a forward's hundreds of small operations (measured on 2 busy cores: 0.4 s instead of 0.1 s per token).
_ACTOR_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_MIN_CONSOLE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The prompts to measure on, and how many rows of the sources were rejected."""

    prompts: tuple[Prompt, ...]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Ready:
    """Everything checked, nothing expensive started."""

    recipe: EvalRecipe
    tasks: tuple[EvalTask, ...]
    held_out: HeldOut
    target: CheckedTarget
    drafter: DrafterConfig
    warnings: tuple[str, ...]


def run_evaluation(config: Config, *, dry_run: bool = False, console: Console | None = None) -> EvaluationReport | None:
    """Measure `<training.output>/drafter` and write rounds, report.json and report.md; None after a dry run.

    Raises ConfigError for wrong settings, a missing or mismatched drafter; EvaluationFailed when actors die, and when
    greedy speculation differs from the target's own output in float32, where it must be exact (the report is written).
    """
    console = console or _console()
    ready = _prepare(config)
    console.print(
        f"evaluate: {len(ready.held_out.prompts)} prompts at temperatures {list(config.evaluation.temperatures)}, "
        f"drafter {ready.recipe.drafter}",
        highlight=False,
    )
    if dry_run:
        return None
    output = output_folder(config)
    output.mkdir(parents=True, exist_ok=True)
    with ray_session(config.cluster):
        results = list(_decode_all(config, ready, output))
    rounds = [row for result in results for row in result.rounds]
    decodes = [row for result in results for row in result.decodes]
    if not rounds:
        reasons = [reason for result in results for reason in result.rejected]
        raise EvaluationFailed(
            f"no round was measured: {reasons[0] if reasons else 'every answer ended with its first token'}; "
            "give other evaluation.prompts"
        )
    report = _make_report(config, ready, results, (rounds, decodes))
    _write(output, config, report, (rounds, decodes))
    print_report(report, console)
    console.print(f"report: {output / REPORT_MARKDOWN}, {output / REPORT_JSON}; every round: {output / ROUNDS}")
    require_lossless(config, report)
    return report


def output_folder(config: Config) -> Path:
    """Where an evaluation's files go."""
    return Path(config.evaluation.output or Path(config.training.output) / "evaluation")


def measured_dtype(config: Config) -> Literal["bfloat16", "float32"]:
    """The target's precision during the evaluation."""
    return config.evaluation.dtype or config.target.dtype


def _console() -> Console:
    """The terminal; wide enough for the tables also where the width is unknown (a job's log)."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _MIN_CONSOLE_WIDTH))


def _prepare(config: Config) -> _Ready:
    section = config.evaluation
    if not section.prompts:
        raise ConfigError("evaluation.prompts is empty; name held-out prompt files")
    if not section.temperatures:
        raise ConfigError("evaluation.temperatures is empty; wanted for instance [0.0, 1.0]")
    folder = Path(config.training.output).absolute() / DRAFTER
    target = check_target(config)
    checked = check_drafter(folder, config, target)
    held_out = read_held_out(config)
    recipe = EvalRecipe(
        target=target.section.model_copy(update={"dtype": measured_dtype(config)}),
        drafter=str(folder),
        untrained_seed=config.training.seed if section.compare_untrained else None,
        template_kwargs=config.generation.chat_template_kwargs,
        history=target.history,
        stop_ids=target.stop_ids,
        max_new_tokens=section.max_new_tokens,
        max_length=min(config.max_length, checked.config.max_position_embeddings),
        seed=section.seed,
        device="cuda" if section.gpus_per_actor > 0 else "cpu",
        threads=section.threads_per_actor or default_threads(section.num_actors),
    )
    tasks = tuple(make_tasks(held_out.prompts, section.temperatures, section.target_prompts_per_domain))
    return _Ready(recipe, tasks, held_out, target, checked.config, checked.warnings)


def read_held_out(config: Config) -> HeldOut:
    """The first `limit_per_domain` usable prompts of each domain, in the order of the files.

    Raises ConfigError for a missing file, and when no row can be used.
    """
    section = config.evaluation
    taken: dict[str, int] = {}
    prompts: list[Prompt] = []
    rejected: list[str] = []
    counts = PromptCounts()
    for item in read_prompts(section.prompts, endpoint_url=config.cache.endpoint_url, counts=counts):
        if isinstance(item, Reject):
            rejected.append(f"{item.source}: {item.reason}")
            continue
        domain = item.domain or NO_DOMAIN
        if section.limit_per_domain is None or taken.get(domain, 0) < section.limit_per_domain:
            taken[domain] = taken.get(domain, 0) + 1
            prompts.append(item)
    if not prompts:
        raise ConfigError(
            f"evaluation.prompts {list(section.prompts)}: no usable prompt in {counts.rows} rows"
            + (f"; the first: {rejected[0]}" if rejected else "")
        )
    return HeldOut(tuple(prompts), tuple(rejected))


def make_tasks(
    prompts: Iterable[Prompt], temperatures: Sequence[float], target_prompts_per_domain: int | None
) -> Iterator[EvalTask]:
    """One task per prompt and temperature; the target decodes alone the first prompts of each domain."""
    seen: dict[str, int] = {}
    for prompt in prompts:
        domain = prompt.domain or NO_DOMAIN
        seen[domain] = seen.get(domain, 0) + 1
        with_target = target_prompts_per_domain is None or seen[domain] <= target_prompts_per_domain
        for temperature in temperatures:
            yield EvalTask(prompt, temperature, with_target)


def _decode_all(config: Config, ready: _Ready, output: Path) -> Iterator[TaskResult]:
    """Results in the order of the tasks, whichever actor finished first."""
    import ray

    section = config.evaluation
    gpus = section.gpus_per_actor if has_accelerators() else 0.0
    recipe = ready.recipe if gpus else replace(ready.recipe, device="cpu")
    remote: Any = ray.remote(EvalActor)
    remote = remote.options(
        num_cpus=section.cpus_per_actor, num_gpus=gpus, runtime_env={"env_vars": dict(_ACTOR_ENVIRONMENT)}
    )
    actors = [remote.remote(recipe) for _ in range(min(section.num_actors, len(ready.tasks)))]
    progress = Progress("evaluate", len(ready.tasks), unit="prompts", log_file=output / "progress.jsonl")
    results: dict[int, TaskResult] = {}
    waiting = list(enumerate(ready.tasks))[::-1]
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            busy = {actor for _, actor in running.values()}
            for actor in (actor for actor in actors if actor not in busy and waiting):
                index, task = waiting.pop()
                running[actor.run.remote(task)] = (index, actor)
            waited = _Tick(section.stall_timeout_s, progress, _running_tau(results))
            for reference in _wait(list(running), waited):
                index, _ = running.pop(reference)
                results[index] = _result_of(reference)
                progress.update(1, detail=_running_tau(results))
    finally:
        for actor in actors:
            ray.kill(actor)
    progress.finish(_running_tau(results))
    yield from (results[index] for index in sorted(results))


@dataclass(frozen=True, slots=True)
class _Tick:
    """What to show while nothing finishes, and for how long."""

    timeout_s: float
    progress: Progress
    detail: str


def _wait(references: list[Any], tick: _Tick) -> list[Any]:
    """Finished references, at least one; a progress line whenever a tick passes without."""
    import ray

    silent = 0.0
    while silent < tick.timeout_s:
        done, _ = ray.wait(references, timeout=_TICK_S)
        if done:
            return done
        silent += _TICK_S
        tick.progress.update(detail=tick.detail)
    raise EvaluationFailed(
        f"evaluate: no prompt finished for {tick.timeout_s:.0f} s, the actors hang or cannot be scheduled; see "
        f"{session_logs()}"
    )


def _result_of(reference: Any) -> TaskResult:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        known = own_error(error)
        if known is not None:
            raise known from error
        line = str(error).strip().splitlines()[-1]
        raise EvaluationFailed(f"evaluate: an actor failed: {line}; see {session_logs()}") from error


def _running_tau(results: Mapping[int, TaskResult]) -> str:
    emitted = [r.emitted for result in results.values() for r in result.rounds if r.drafter == TRAINED]
    return (
        f"τ {sum(emitted) / len(emitted):.2f} over {len(emitted):,} rounds"
        if emitted
        else "loading the target, first prompts"
    )


def _make_report(
    config: Config, ready: _Ready, results: Sequence[TaskResult], rows: tuple[list[RoundRow], list[DecodeRow]]
) -> EvaluationReport:
    rounds, decodes = rows
    section = config.evaluation
    block_size = ready.drafter.block_size
    acceptance = tuple(summarise(rounds, block_size=block_size, seed=section.seed))
    rejected_turns = [reason for result in results for reason in result.rejected]
    warnings = list(ready.warnings)
    if ready.held_out.rejected:
        warnings.append(f"{len(ready.held_out.rejected)} rows rejected; the first: {ready.held_out.rejected[0]}")
    if rejected_turns:
        warnings.append(f"{len(rejected_turns)} turns not evaluated; the first: {rejected_turns[0]}")
    longest = max(d.prompt_tokens + len(d.output_ids) for d in decodes)
    if longest > config.training.max_length:
        warnings.append(
            f"evaluated up to {longest} tokens, trained up to training.max_length {config.training.max_length}"
        )
    report = EvaluationReport(
        name=config.name,
        drafter=ready.recipe.drafter,
        target=config.target.path,
        block_size=block_size,
        settings=_settings(config, ready),
        acceptance=acceptance,
        speed=tuple(summarise_speed(rounds, decodes)),
        greedy=tuple(check_greedy(decodes)),
        agreement=None,
        warnings=tuple(warnings),
        counts={
            "prompts": len(ready.held_out.prompts),
            "rows_rejected": len(ready.held_out.rejected),
            "turns_rejected": len(rejected_turns),
            "rounds": len(rounds),
            "answers_stopped": sum(d.finish == "stop" for d in decodes),
            "answers_cut_at_max_new_tokens": sum(d.finish == "length" for d in decodes),
        },
    )
    return add_agreement(report, expected_tau(Path(config.training.output)))


def add_agreement(report: EvaluationReport, expected: float | None) -> EvaluationReport:
    """Compare training's expected accepted length with the measured one; warn when they disagree or one is missing."""
    temperature = min({s.temperature for s in report.acceptance}, key=lambda t: abs(t - 1.0))
    measured = report.summary(TRAINED, temperature)
    if expected is None or measured is None:
        warning = "training's expected accepted length is unknown (no metrics.jsonl): it was not compared"
        return replace(report, warnings=(*report.warnings, warning))
    agreement = TauAgreement(expected=expected, measured=measured.accepted_length.value, temperature=temperature)
    warnings = report.warnings
    if not agreement.agrees:
        warnings += (
            f"training expected an accepted length of {expected:.2f}, decoding gave {agreement.measured:.2f}: held-out "
            "prompts may differ from the training ones, or training and serving disagree (layers, layout, template)",
        )
    return replace(report, agreement=agreement, warnings=warnings)


def _settings(config: Config, ready: _Ready) -> dict[str, Any]:
    section = config.evaluation
    chat = ready.target.chat
    shown = ready.held_out.prompts[:_SHOWN_PROMPTS]
    return {
        **section.model_dump(mode="json"),
        "dtype": measured_dtype(config),
        "stop_ids": list(ready.target.stop_ids),
        "chat_template_kwargs": config.generation.chat_template_kwargs,
        "threads": ready.recipe.threads,
        "block_size": ready.drafter.block_size,
        "target_layer_ids": list(ready.drafter.target_layer_ids),
        "first_rendered_prompts": [chat.text(prompt.system, prompt.users[:1], []) for prompt in shown],
    }


def _write(
    output: Path, config: Config, report: EvaluationReport, rows: tuple[list[RoundRow], list[DecodeRow]]
) -> None:
    tables = {ROUNDS: [asdict(row) for row in rows[0]], DECODES: [asdict(row) for row in rows[1]]}
    for name, values in tables.items():
        temporary = output / f".{name}.tmp"
        pq.write_table(pa.Table.from_pylist(values), temporary, compression="zstd")
        os.replace(temporary, output / name)
    for name, text in (
        (REPORT_JSON, report.to_json()),
        (REPORT_MARKDOWN, markdown(report)),
        ("config.yaml", dump_config(config)),
    ):
        temporary = output / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, output / name)


def require_lossless(config: Config, report: EvaluationReport) -> None:
    """In float32 a greedy difference is a bug; in bfloat16 rounding differs between one and many tokens at a time."""
    broken = [check for check in report.greedy if check.equal < check.compared]
    if broken and measured_dtype(config) == "float32":
        prompt, turn, index = broken[0].differences[0]
        raise EvaluationFailed(
            f"greedy speculation with the {broken[0].drafter} drafter changed {len(broken[0].differences)} of "
            f"{broken[0].compared} answers of a float32 target (first: prompt {prompt}, turn {turn}, token {index}); "
            f"it must be exact: report it with {REPORT_JSON}"
        )
