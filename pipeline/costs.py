"""Measuring what a step costs: the real target with a key/value cache, and the real drafter, on the present device.

Weights do not change what a forward pass costs, so before training a drafter with fresh ones stands in.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from model.decoding.chain_drafting import make_drafter
from model.decoding.cost_table import CostTable, measure, save_cost_table
from model.decoding.drafting import Drafter
from model.decoding.sampling import Sampling
from model.export import load_drafter
from model.family import AnyDrafter, new_drafter
from model.target_heads import load_target_heads
from pipeline import html_report
from pipeline.cluster import has_accelerators, ray_session, session_logs
from pipeline.config import Config
from pipeline.config_serving import CostSection
from pipeline.engines.hf import load_target, resolve_target, torch_dtype, worker_section
from pipeline.errors import ConfigError, EvaluationFailed
from pipeline.report_text import print_warnings, wide_console
from pipeline.serving import COSTS, busy_warnings, cost_table_path
from pipeline.serving_plots import plot_cost_table, save_png
from pipeline.telemetry import Progress
from pipeline.train.recipe import drafter_config
from pipeline.train.worker import DRAFTER
from pipeline.work import own_error

_DRAFTED_REQUESTS = (1, 2, 4, 8)
_DENSE, _PER_OCTAVE = 32, 16
_TICK_S = 5.0
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRecipe:
    """What the measuring process needs; travels to a worker."""

    config: Config
    device: str


def run_measurement(config: Config, *, dry_run: bool = False, console: Console | None = None) -> CostTable | None:
    """Measure where Ray has the accelerator; write the table and its picture beside it. None after a dry run.

    Raises ConfigError for a target that cannot be loaded, EvaluationFailed when the measuring process dies.
    """
    console = console or wide_console()
    path = cost_table_path(config)
    section = config.cost
    sizes = token_counts(section.max_tokens)
    console.print(
        f"measure: {config.target.path} at {len(sizes)} sizes from 1 to {sizes[-1]} tokens, {section.context_tokens} "
        f"tokens of context, {section.repeats} repeats, and {_drafter_name(config)}",
        highlight=False,
        markup=False,
    )
    resolve_target(config.target)
    if dry_run:
        return None
    table = _measure_on_ray(config)
    save_cost_table(table, path)
    picture = save_png(plot_cost_table(table), path.with_name(COSTS))
    for size in (1, 8, 64, table.max_tokens):
        if size <= table.max_tokens:
            console.print(f"{size:>5} tokens: {1e3 / table.at(size):9.2f} ms, {table.at(size):8.2f} steps per second")
    console.print(
        f"drafting: {1e3 * table.draft_seconds:.2f} ms per pass + {1e6 * table.draft_seconds_per_token:.1f} µs per "
        "position"
    )
    print_warnings(busy_warnings(table), console)
    console.print(f"cost table: {path}; picture: {picture}")
    page = html_report.write_html(config, html_report.output_folder(config))
    if page is not None:
        console.print(f"the evaluation's page shows it too: {page}")
    return table


def token_counts(max_tokens: int) -> list[int]:
    """Sizes to measure: every one up to 32, then 16 per octave, and the largest."""
    sizes = list(range(1, min(_DENSE, max_tokens) + 1))
    while sizes[-1] < max_tokens:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(min(sizes[-1] + octave // _PER_OCTAVE, max_tokens))
    return sizes


def count_steps(section: CostSection) -> int:
    """Forward passes that a measurement makes, the untimed ones included."""
    sizes = len(token_counts(section.max_tokens)) + len(_DRAFTED_REQUESTS)
    return sizes * (section.warm_up + section.repeats)


@torch.no_grad()
def measure_costs(recipe: CostRecipe, on_step: Callable[[], None] = lambda: None) -> CostTable:
    """Measure in this process; `on_step` is called after each of the `count_steps` passes.

    A step is one sequence's B tokens behind `context_tokens` in the cache, with logits and captured layers for all B,
    as verification needs them. Drafting is timed for batches of whole blocks and written as a line in their positions.
    """
    from pipeline.engines.hf_verifier import HfVerifier

    config, section = recipe.config, recipe.config.cost
    if section.clock == "cpu" and recipe.device != "cpu":
        raise ConfigError(f"cost.clock cpu does not see what {recipe.device} does; set it to wall")
    torch.set_num_threads(section.threads or len(os.sched_getaffinity(0)))
    target = load_target(config.target, recipe.device)
    model = _drafter(config).to(recipe.device, torch_dtype(config.target)).eval()
    verifier = HfVerifier(target, model.config.target_layer_ids)
    context = [int(token) % model.config.vocab_size for token in range(1, section.context_tokens + 1)]
    hidden = verifier.add([context]).hidden

    def step(tokens: int) -> None:
        verifier.extend([[context[at % len(context)] for at in range(tokens)]])
        verifier.crop([len(context)])
        _wait(recipe.device)

    sizes = token_counts(section.max_tokens)
    time_steps = partial(
        measure, repeats=section.repeats, warm_up=section.warm_up, clock=_CLOCKS[section.clock], on_step=on_step
    )
    seconds = time_steps(step, sizes)
    heads = load_target_heads(
        resolve_target(config.target), dtype=model.dtype, device=recipe.device, draft_ids=model.draft_ids
    )
    batches = {count: _after(make_drafter(model, heads), hidden, context, count) for count in _DRAFTED_REQUESTS}
    block = batches[1].block_size

    def draft(requests: int) -> None:
        uniforms = torch.zeros(requests, block, device=recipe.device)
        batches[requests].propose([context[0]] * requests, Sampling(temperature=0.0), uniforms)
        _wait(recipe.device)

    start, slope = fit_line([requests * block for requests in batches], time_steps(draft, list(batches)))
    return CostTable(
        device=device_name(recipe.device),
        target=Path(config.target.path).name,
        kind="measured",
        context_tokens=section.context_tokens,
        tokens=tuple(sizes),
        steps_per_second=tuple(1.0 / second for second in seconds),
        draft_seconds=start,
        draft_seconds_per_token=slope,
        note=f"{config.name}, {config.target.dtype}, {_drafter_name(config)}, transformers, {section.clock} seconds",
    )


def _after(drafter: Drafter, hidden_1TC: torch.Tensor, context: list[int], requests: int) -> Drafter:
    """The drafter with so many requests in it, all behind the same context."""
    drafter.add(hidden_1TC.expand(requests, -1, -1), [context] * requests)
    return drafter


class _Meter:
    """The measuring process, and how far it is; two threads, so that it answers while it measures."""

    def __init__(self) -> None:
        self._steps = 0

    def measure(self, recipe: CostRecipe) -> CostTable:
        return measure_costs(recipe, self._count)

    def steps(self) -> int:
        return self._steps

    def _count(self) -> None:
        self._steps += 1


def fit_line(positions: list[int], seconds: list[float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of seconds by positions."""
    slope, start = np.polyfit(positions, seconds, 1)
    if start < 0:  # through the origin then
        return 0.0, float(np.dot(positions, seconds) / np.dot(positions, positions))
    return (float(start), float(slope)) if slope > 0 else (float(np.mean(seconds)), 0.0)


def device_name(device: str) -> str:
    """What the numbers were measured on, for people."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _drafter(config: Config) -> AnyDrafter:
    """The exported drafter, or before there is one its untrained twin."""
    folder = Path(config.training.output) / DRAFTER
    if (folder / "config.json").is_file():
        return load_drafter(folder)
    return new_drafter(drafter_config(config)).init_weights(config.training.seed)


def _drafter_name(config: Config) -> str:
    folder = Path(config.training.output) / DRAFTER
    return (
        f"the drafter {folder}" if (folder / "config.json").is_file() else "an untrained drafter of the config's shape"
    )


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _measure_on_ray(config: Config) -> CostTable:
    section = config.cost
    absolute = config.training.model_copy(update={"output": str(Path(config.training.output).absolute())})
    local = config.model_copy(update={"target": worker_section(config.target), "training": absolute})
    with ray_session(config.cluster):
        import ray

        gpus = section.gpus if has_accelerators() else 0.0
        actor: Any = ray.remote(_Meter).options(num_cpus=section.cpus, num_gpus=gpus, max_concurrency=2)
        meter = actor.remote()
        pending = [meter.measure.remote(CostRecipe(config=local, device="cuda" if gpus else "cpu"))]
        progress = Progress("measure", count_steps(section), unit="steps")
        asked, waited = [meter.steps.remote()], 0.0
        try:
            while not ray.wait(pending, timeout=_TICK_S)[0]:
                waited += _TICK_S
                if waited >= section.timeout_s:
                    raise EvaluationFailed(
                        f"measure: no table after {waited:.0f} s: the process hangs or cannot be scheduled "
                        f"({section.cpus:g} CPUs, {gpus:g} GPUs); see {session_logs()}, or raise cost.timeout_s"
                    )
                done = progress.done
                if ray.wait(asked, timeout=0)[0] and not ray.wait(pending, timeout=0)[0]:
                    done = ray.get(asked[0])
                    asked = [meter.steps.remote()]
                progress.update(done - progress.done, detail="" if done else "loading the target")
            table: CostTable = ray.get(pending[0])
            progress.update(progress.total - progress.done)
            progress.finish()
        except ray.exceptions.RayError as error:
            known = own_error(error)
            if known is not None:
                raise known from error
            line = str(error).strip().splitlines()[-1]
            raise EvaluationFailed(f"measure: the measuring process failed: {line}; see {session_logs()}") from error
    return table
