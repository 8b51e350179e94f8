"""Configuration of measured costs and simulated serving."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config_section import Section


class AcceptanceSection(Section):
    """Acceptance in a simulation without recorded rounds: log-odds by position, request, round and draft."""

    first: float = Field(default=0.85, gt=0, lt=1)
    """Acceptance of the first draft of an average round."""
    decay: float = Field(default=0.15, ge=0)
    """What the log-odds lose per position."""
    request_spread: float = Field(default=0.6, ge=0)
    """Standard deviation of the log-odds between requests; then between rounds, and between drafts of a round."""
    round_spread: float = Field(default=1.0, ge=0)
    draft_spread: float = Field(default=0.6, ge=0)
    overconfidence: float = Field(default=1.0, gt=0)
    """Confidence log-odds are the true ones times this; 1 is calibrated."""
    requests: int = Field(default=512, gt=0)
    rounds_per_request: int = Field(default=64, gt=0)
    mean_output_tokens: int = Field(default=256, gt=1)


class SimulationSection(Section):
    """Serving simulated from a cost table and an acceptance trace."""

    cost_table: str | None = None
    """null: `cost.output`'s."""
    rounds: str | None = None
    """Parquet table of recorded rounds (an evaluation's rounds.parquet); null: the formula in `acceptance`."""
    temperature: float | None = None
    """Use the recorded rounds of this temperature alone; null: all."""
    calibration: str | None = None
    """calibration.json whose temperatures the recorded confidences go through first; null: as recorded."""
    output: str | None = None
    """Folder of the results; null: `<training.output>/simulation`."""
    policies: tuple[str, ...] = ()
    """Empty: all that the trace's block allows."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Requests running at the same time; one point each."""
    arrivals_per_second: float | None = Field(default=None, gt=0)
    """Poisson arrivals; null: as many users as `concurrency`, each asking again at once."""
    requests: int = Field(default=32, gt=0)
    """Finished requests measured per point; twice the concurrency where that is more."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """Confidence below which the policy `threshold` stops."""
    adapt_drafting: bool = True
    """The DSpark policies draft fewer positions, down to none, where earlier confidences say that they will not pay."""
    smooth_costs: bool = True
    """Algorithm 1 plans with the table's cliffs smoothed; time passes as the table says."""
    acceptance: AcceptanceSection = AcceptanceSection()
    seed: int = 42


class CostSection(Section):
    """Measuring the target's steps per second by tokens per forward pass."""

    output: str | None = None
    """The cost table; null: `<training.output>/cost_table.json`."""
    max_tokens: int = Field(default=256, gt=0)
    """Largest forward pass: concurrency x (1 + block) is what a simulation needs."""
    context_tokens: int = Field(default=256, gt=0)
    """Tokens in the key/value cache."""
    repeats: int = Field(default=7, gt=0)
    warm_up: int = Field(default=2, ge=0)
    """Untimed calls per size."""
    cpus: float = Field(default=1.0, gt=0)
    gpus: float = Field(default=0.0, ge=0)
    threads: int | None = Field(default=None, gt=0)
    """CPU threads; null: all of the machine's."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: the process's CPU seconds; with threads 1 they hold on a machine that is busy with something else."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """No table after this long means that the measuring process hangs: stop with a message."""
