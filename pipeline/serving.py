"""The serving simulation as a job: cost table and trace in; points, tables and pictures out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from model.decoding import calibration
from model.decoding.cost_table import CostTable, load_cost_table
from model.decoding.policies import POLICIES, PlannerOptions
from model.decoding.scheduler import warm_up
from model.decoding.simulate import Load, Point, simulate
from model.decoding.trace import ParametricAcceptance, Trace, parametric_trace
from model.errors import CostTableError
from pipeline import html_report
from pipeline.atomic_file import write_atomically
from pipeline.config import Config, dump_config
from pipeline.errors import ConfigError
from pipeline.recorded_rounds import Calibrate, read_recorded_trace
from pipeline.report_text import print_warnings, wide_console
from pipeline.serving_plots import plot_budget, plot_cost_table, plot_frontier, save_png
from pipeline.telemetry import Progress

VERSION = 1
RESULT = "simulation.json"
FRONTIER, BUDGET, COSTS = "frontier.png", "budget.png", "cost_table.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Every simulated point and what it rests on."""

    name: str
    table: CostTable
    source: str
    """Where the acceptance comes from, in a few words."""
    block_size: int
    points: tuple[Point, ...]
    settings: dict[str, Any]
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """The result as JSON text."""
        data = {
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "block_size": self.block_size,
            "points": [asdict(point) for point in self.points],
            "settings": self.settings,
            "warnings": list(self.warnings),
            "cost_table": json.loads(self.table.to_json()),
        }
        return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def load_simulation(path: str | Path) -> SimulationResult:
    """Read a simulation.json, for instance for a report. Raises ConfigError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ConfigError(f"{path}: version {data['version']}, this program reads {VERSION}; simulate again")
        return SimulationResult(
            name=data["name"],
            table=CostTable.from_json(json.dumps(data["cost_table"]), str(path)),
            source=data["source"],
            block_size=data["block_size"],
            points=tuple(Point(**point) for point in data["points"]),
            settings=data["settings"],
            warnings=tuple(data["warnings"]),
        )
    except (OSError, ValueError, KeyError, TypeError, CostTableError) as error:
        raise ConfigError(f"{path}: not a simulation's result: {type(error).__name__}: {error}") from error


def cost_table_path(config: Config) -> Path:
    """Where `measure_cost` writes the table, and where the simulation looks for it by default."""
    return Path(config.cost.output or Path(config.training.output) / "cost_table.json")


def output_folder(config: Config) -> Path:
    """Where a simulation's files go."""
    return Path(config.simulation.output or Path(config.training.output) / "simulation")


def run_simulation(config: Config, *, dry_run: bool = False, console: Console | None = None) -> SimulationResult | None:
    """Simulate every policy at every concurrency; write simulation.json and three pictures. None after a dry run.

    Raises ConfigError for settings that do not fit each other, CostTableError for an unusable table.
    """
    console = console or wide_console()
    prepared = prepare(config)
    policies = _policies(config, prepared.trace.block_size)
    _check_reach(config, prepared)
    console.print(
        f"simulate: {len(policies)} policies at {len(config.simulation.concurrency)} loads, acceptance: "
        f"{prepared.source}, costs: {prepared.table.kind}, {prepared.table.target} on {prepared.table.device}",
        highlight=False,
        markup=False,
    )
    if dry_run:
        print_warnings(prepared.warnings, console)
        return None
    output = output_folder(config)
    output.mkdir(parents=True, exist_ok=True)
    warm_up()
    progress = Progress("simulate", len(policies) * len(config.simulation.concurrency), unit="points")
    points = []
    for policy, load in _cells(config, policies):
        points.append(simulate(prepared.trace, prepared.table, policy, load))
        progress.update(1, detail=f"{policy} at {load.concurrency}")
    progress.finish()
    result = SimulationResult(
        name=config.name,
        table=prepared.table,
        source=prepared.source,
        block_size=prepared.trace.block_size,
        points=tuple(points),
        settings=config.simulation.model_dump(mode="json"),
        warnings=prepared.warnings,
    )
    _write(output, config, result)
    print_result(result, console)
    console.print(f"result: {output / RESULT}; pictures: {', '.join((FRONTIER, BUDGET, COSTS))} beside it")
    page = html_report.write_html(config, html_report.output_folder(config))
    if page is not None:
        console.print(f"the evaluation's page shows them too: {page}")
    return result


@dataclass(frozen=True, slots=True)
class Prepared:
    """A simulation's inputs."""

    trace: Trace
    table: CostTable
    source: str
    warnings: tuple[str, ...]


def prepare(config: Config) -> Prepared:
    """Read or draw the trace, read the table. Raises ConfigError and CostTableError."""
    section = config.simulation
    table = load_cost_table(section.cost_table or cost_table_path(config))
    warnings = busy_warnings(table)
    if table.draft_cost(1) == 0:
        warnings.append("the cost table holds no cost of drafting: every policy drafts for free")
    if section.rounds is None:
        if section.temperature is not None or section.calibration is not None:
            raise ConfigError(
                "simulation.temperature and simulation.calibration are about recorded rounds; set simulation.rounds, "
                "or leave them null"
            )
        acceptance = ParametricAcceptance(block_size=config.drafter.block_size, **section.acceptance.model_dump())
        trace, source = parametric_trace(acceptance, section.seed), "a formula"
    else:
        scaled = None if section.calibration is None else _scaling(section.calibration)
        recorded = read_recorded_trace(section.rounds, temperature=section.temperature, calibrate=scaled)
        trace = recorded.trace
        source = f"{len(trace.accepted_N)} recorded rounds of {len(trace.first_round_Q)} answers"
        source += "" if scaled is None else ", calibrated"
        if recorded.cut:
            warnings.append(
                f"{recorded.cut} of {recorded.rounds} recorded rounds left out: they were cut, so what their whole "
                "blocks would have come to is not known"
            )
    return Prepared(trace, table, source, tuple(warnings))


def _scaling(path: str) -> Calibrate:
    """The temperatures of a saved calibration, as a map of confidences."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"simulation.calibration {path}: cannot read it: {error.strerror or error}") from error
    temperatures = calibration.from_json(text, source=path).temperatures
    return lambda confidences_NK: calibration.scale(torch.from_numpy(confidences_NK), temperatures).float().numpy()


def busy_warnings(table: CostTable) -> list[str]:
    """What looks wrong in a measured table: more tokens cannot take less time."""
    found = table.speed_ups()
    if not found:
        return []
    tokens, gain = max(found, key=lambda pair: pair[1])
    return [
        f"{len(found)} of {len(table.tokens)} sizes of the cost table run faster than a smaller one, the worst "
        f"{tokens} tokens by {gain:.0%}: the machine was busy when it was measured (more cost.repeats help)"
    ]


def print_result(result: SimulationResult, console: Console) -> None:
    """One table per quantity, one column per load, and the warnings."""
    policies = list(dict.fromkeys(point.policy for point in result.points))
    by_cell = {(point.policy, point.concurrency): point for point in result.points}
    users = sorted({point.concurrency for point in result.points})
    quantities = {
        "tokens per second, all users": lambda point: _speed(point.tokens_per_second),
        "tokens per second per user": lambda point: _speed(point.tokens_per_second_per_user),
        "drafts verified per request and round": lambda point: f"{point.budget:.1f}",
    }
    for title, form in quantities.items():
        table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE, pad_edge=False)
        table.add_column("users", no_wrap=True)
        for count in users:
            table.add_column(str(count), justify="right")
        for policy in policies:
            cells = [form(by_cell[policy, count]) for count in users]
            table.add_row(policy, *cells, style="bold" if policy.startswith("dspark") else None)
        console.print(table)
    print_warnings(result.warnings, console)


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _cells(config: Config, policies: tuple[str, ...]) -> Iterator[tuple[str, Load]]:
    section = config.simulation
    load = Load(
        concurrency=1,
        requests=1,
        arrivals_per_second=section.arrivals_per_second,
        options=PlannerOptions(
            threshold=section.threshold, adapt_drafting=section.adapt_drafting, smooth_costs=section.smooth_costs
        ),
        seed=section.seed,
    )
    for policy in policies:
        for users in section.concurrency:
            yield policy, replace(load, concurrency=users, requests=max(section.requests, 2 * users))


def _policies(config: Config, block_size: int) -> tuple[str, ...]:
    chosen = config.simulation.policies
    unknown = [name for name in chosen if name not in POLICIES]
    if unknown:
        raise ConfigError(f"simulation.policies: {unknown} unknown; wanted some of {list(POLICIES)}")
    too_long = [name for name in chosen if (POLICIES[name].drafts or 0) > block_size]
    if too_long:
        raise ConfigError(f"simulation.policies: {too_long} verify more than the {block_size} drafts of a block")
    return chosen or tuple(name for name, policy in POLICIES.items() if (policy.drafts or 0) <= block_size)


def _check_reach(config: Config, prepared: Prepared) -> None:
    users = config.simulation.concurrency
    per_request = 1 + prepared.trace.block_size
    if not users or min(users) < 1:
        raise ConfigError(f"simulation.concurrency {list(users)}: wanted numbers of requests from 1 on")
    if max(users) * per_request > prepared.table.max_tokens:
        raise ConfigError(
            f"simulation.concurrency {max(users)} x {per_request} tokens exceeds the cost table, which ends at "
            f"{prepared.table.max_tokens}: simulate up to {prepared.table.max_tokens // per_request} requests, or "
            "measure with a larger cost.max_tokens"
        )


def _write(output: Path, config: Config, result: SimulationResult) -> None:
    for name, text in ((RESULT, result.to_json()), ("config.yaml", dump_config(config))):
        write_atomically(output / name, text)
    save_png(plot_frontier(result), output / FRONTIER)
    save_png(plot_budget(result), output / BUDGET)
    save_png(plot_cost_table(result.table), output / COSTS)
