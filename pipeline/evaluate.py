"""Evaluation: accepted length by real speculative decoding of held-out prompts, from the exported drafter.

Ray actors decode (eval_actor, eval_run), pure functions summarise (acceptance), and this file connects and checks them.
Nothing is resumed: an evaluation is short, and its times belong to one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from cache_store.identity import digest_weights
from model.config import DrafterConfig
from pipeline.acceptance import ALL_DOMAINS, TRAINED, break_down, check_greedy, summarise, summarise_speed
from pipeline.atomic_file import write_atomically
from pipeline.cluster import ray_session
from pipeline.config import Config, dump_config
from pipeline.drafter_check import CheckedDrafter, check_drafter, expected_tau
from pipeline.errors import ConfigError, EvaluationFailed
from pipeline.eval_actor import EvalRecipe, EvalTask, default_threads
from pipeline.eval_run import Measured, decode_tasks
from pipeline.held_out import HeldOut, Leak, find_leak, make_tasks, read_held_out
from pipeline.html_report import CALIBRATION, REPORT_JSON, output_folder, saved_calibration, write_html
from pipeline.identity import CheckedTarget, check_target
from pipeline.report import DRAFTER_WEIGHTS, EvaluationReport, TauAgreement
from pipeline.report_text import markdown, print_report, print_warnings, wide_console
from pipeline.rounds_table import ROUNDS, write_tables
from pipeline.sweep import calibrated, sweep_thresholds
from pipeline.train.worker import DRAFTER

REPORT_MARKDOWN = "report.md"
_SHOWN_PROMPTS = 3
USELESS_TAU = 1.05
"""A trained drafter below this accepted length is called useless."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """Everything checked, nothing expensive started."""

    recipe: EvalRecipe
    tasks: tuple[EvalTask, ...]
    held_out: HeldOut
    leak: Leak
    target: CheckedTarget
    drafter: DrafterConfig
    warnings: tuple[str, ...]


def run_evaluation(config: Config, *, dry_run: bool = False, console: Console | None = None) -> EvaluationReport | None:
    """Measure `<training.output>/drafter` and write rounds, report.json and report.md; None after a dry run.

    Raises ConfigError for wrong settings, a missing or mismatched drafter; EvaluationFailed when actors die, and when
    greedy speculation differs from the target's own output in float32, where it must be exact (the report is written).
    """
    console = console or wide_console()
    ready = _prepare(config)
    console.print(
        f"evaluate: {len(ready.held_out.prompts)} prompts at temperatures {list(config.evaluation.temperatures)}, "
        f"drafter {ready.recipe.drafter}",
        highlight=False,
        markup=False,
    )
    if dry_run:
        print_warnings(ready.warnings, console)
        return None
    output = output_folder(config)
    output.mkdir(parents=True, exist_ok=True)
    with ray_session(config.cluster):
        measured = decode_tasks(ready.recipe, config.evaluation, ready.tasks, output / "progress.jsonl")
    if not measured.rounds:
        reason = measured.rejected[0] if measured.rejected else "every answer ended with its first token"
        raise EvaluationFailed(f"no round was measured: {reason}; give other evaluation.prompts")
    report = _make_report(config, ready, measured)
    write_tables(output, measured.rounds, measured.decodes)
    _write(output, config, report)
    page = write_html(config, output)
    print_report(report, console)
    if (output / CALIBRATION).is_file() and saved_calibration(report, output) is None:
        console.print(f"{output / CALIBRATION} is another drafter's and not shown; run jobs/calibrate_drafter.py")
    console.print(f"report: {page}, {output / REPORT_MARKDOWN}, {output / REPORT_JSON}; every round: {output / ROUNDS}")
    require_lossless(config, report)
    return report


def make_recipe(config: Config, target: CheckedTarget, folder: Path, drafter: CheckedDrafter) -> EvalRecipe:
    """What the actors need, for the drafter exported to `folder`."""
    section = config.evaluation
    return EvalRecipe(
        target=target.section.model_copy(update={"dtype": measured_dtype(config)}),
        drafter=str(folder),
        untrained_seed=config.training.seed if section.compare_untrained else None,
        template_kwargs=config.generation.chat_template_kwargs,
        history=target.history,
        stop_ids=target.stop_ids,
        max_new_tokens=section.max_new_tokens,
        max_length=min(config.max_length, drafter.config.max_position_embeddings),
        seed=section.seed,
        device="cuda" if section.gpus_per_actor > 0 else "cpu",
        threads=section.threads_per_actor or default_threads(section.num_actors),
        batch_size=section.batch_size,
        top_p=section.top_p,
        top_k=section.top_k,
        confidence_threshold=section.confidence_threshold,
        confidence_temperatures=drafter.confidence_temperatures,
    )


def measured_dtype(config: Config) -> Literal["bfloat16", "float32"]:
    """The target's precision during the evaluation."""
    return config.evaluation.dtype or config.target.dtype


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
    recipe = make_recipe(config, target, folder, checked)
    if recipe.max_new_tokens >= recipe.max_length:
        raise ConfigError(
            f"evaluation.max_new_tokens {recipe.max_new_tokens} leaves no room for a prompt within {recipe.max_length} "
            "tokens (max_length, and the drafter's max_position_embeddings)"
        )
    if recipe.confidence_threshold > 0 and not checked.config.enable_confidence_head:
        raise ConfigError(
            f"evaluation.confidence_threshold {recipe.confidence_threshold:g}: {folder} has no confidence head; set it "
            "to 0"
        )
    tasks = tuple(make_tasks(held_out.prompts, section.temperatures, section.baseline_prompts_per_domain))
    leak = find_leak(config, held_out.prompts)
    return _Ready(recipe, tasks, held_out, leak, target, checked.config, checked.warnings)


def _make_report(config: Config, ready: _Ready, measured: Measured) -> EvaluationReport:
    rounds, decodes = measured.rounds, measured.decodes
    trained = [row for row in rounds if row.drafter == TRAINED]
    block_size, seed = ready.drafter.block_size, config.evaluation.seed
    report = EvaluationReport(
        name=config.name,
        drafter=ready.recipe.drafter,
        target=config.target.path,
        block_size=block_size,
        settings=_settings(config, ready),
        acceptance=tuple(summarise(rounds, block_size=block_size, seed=seed)),
        breakdowns=tuple(break_down(rounds, block_size=block_size, seed=seed)),
        sweep=tuple(sweep_thresholds(calibrated(trained, ready.recipe.confidence_temperatures))),
        speed=tuple(summarise_speed(rounds, decodes)),
        greedy=tuple(check_greedy(decodes)),
        agreement=None,
        warnings=(*ready.warnings, *_findings(config, ready, measured)),
        counts={
            "prompts": len(ready.held_out.prompts),
            "rows_rejected": len(ready.held_out.rejected),
            "turns_rejected": len(measured.rejected),
            "prompts_also_trained_on": len(ready.leak.prompt_ids),
            "rounds": len(rounds),
            "answers_stopped": sum(d.finish == "stop" for d in decodes),
            "answers_cut_at_max_new_tokens": sum(d.finish == "length" for d in decodes),
        },
    )
    return add_agreement(flag_useless(report), expected_tau(Path(config.training.output)))


def _findings(config: Config, ready: _Ready, measured: Measured) -> Iterator[str]:
    """What a reader must know before believing the numbers."""
    if ready.held_out.rejected:
        yield f"{len(ready.held_out.rejected)} rows rejected; the first: {ready.held_out.rejected[0]}"
    if measured.rejected:
        yield f"{len(measured.rejected)} turns not evaluated; the first: {measured.rejected[0]}"
    longest = max(d.prompt_tokens + len(d.output_ids) for d in measured.decodes)
    if longest > config.training.max_length:
        yield f"evaluated up to {longest} tokens, trained up to training.max_length {config.training.max_length}"
    if ready.drafter.max_position_embeddings < config.max_length:
        yield (
            f"the drafter's max_position_embeddings {ready.drafter.max_position_embeddings} is below max_length "
            f"{config.max_length}: longer conversations were left out, and it should not serve them"
        )
    leak = ready.leak
    if leak.problem:
        yield f"not compared with the training prompts: {leak.problem}"
    if leak.prompt_ids:
        yield (
            f"{len(leak.prompt_ids)} of {len(ready.held_out.prompts)} evaluation prompts were trained on (the first: "
            f"{leak.prompt_ids[0]}): their accepted length says little about new prompts"
        )


def flag_useless(report: EvaluationReport) -> EvaluationReport:
    """Warn where the trained drafter contributes nothing: a token per round is what the target gives alone."""
    warnings = [
        f"the drafter contributes nothing at temperature {s.temperature:g}: τ {s.accepted_length.value:.2f}, where "
        "the target alone has 1.00; look for another target or template, wrong layers, a wrong block layout or a run "
        "that did not train"
        for s in report.acceptance
        if s.drafter == TRAINED and s.domain == ALL_DOMAINS and s.accepted_length.value < USELESS_TAU
    ]
    return replace(report, warnings=(*report.warnings, *warnings))


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
        DRAFTER_WEIGHTS: digest_weights(ready.recipe.drafter),
        "confidence_temperatures": list(ready.recipe.confidence_temperatures),
        "target_layer_ids": list(ready.drafter.target_layer_ids),
        "first_rendered_prompts": [chat.text(prompt.system, prompt.users[:1], []) for prompt in shown],
    }


def _write(output: Path, config: Config, report: EvaluationReport) -> None:
    for name, text in (
        (REPORT_JSON, report.to_json()),
        (REPORT_MARKDOWN, markdown(report)),
        ("config.yaml", dump_config(config)),
    ):
        write_atomically(output / name, text)


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
