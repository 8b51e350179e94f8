"""Configuration of evaluation and calibration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from pipeline.config_section import Section


class EvaluationSection(Section):
    """Accepted length by real speculative decoding on held-out prompts."""

    prompts: tuple[str, ...] = ()
    output: str | None = None
    """Folder of the report; null: `<training.output>/evaluation`."""
    limit_per_domain: int | None = Field(default=None, gt=0)
    dtype: Literal["bfloat16", "float32"] | None = None
    """The target's precision while it is measured; null: target.dtype. In float32 greedy equality must be exact."""
    max_new_tokens: int = Field(default=256, gt=0)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """With top_k: cuts the distribution of temperatures above 0, the target's and the drafter's alike."""
    top_k: int = Field(default=-1, ge=-1)
    confidence_threshold: float = Field(default=0.0, ge=0.0, le=1.0)
    """Verify the drafts before the first whose confidence is below this; 0 verifies all, which calibration needs."""
    batch_size: int = Field(default=8, gt=0)
    """Requests that an actor decodes at a time; finished ones make room for waiting ones."""
    compare_untrained: bool = True
    """Measure the same drafter before training beside the trained one, as a baseline."""
    baseline_prompts_per_domain: int | None = Field(default=None, gt=0)
    """Prompts per domain that the baselines decode as well: the target alone (its speed, and equality) and the
    untrained drafter; null: all. The trained drafter decodes every prompt."""
    allow_mismatch: bool = False
    """Only warn when target, tokenizer or template differ from those that the drafter was trained for."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """No finished prompt for this long means that the actors hang: stop with a message."""
    num_actors: int = Field(default=1, gt=0)
    cpus_per_actor: float = Field(default=1.0, gt=0)
    gpus_per_actor: float = Field(default=0.0, ge=0)
    threads_per_actor: int | None = Field(default=None, gt=0)
    seed: int = 42

    @field_validator("temperatures")
    @classmethod
    def _temperatures_differ(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(temperature < 0 for temperature in value) or len(set(value)) < len(value):
            raise ValueError("wanted 0 (greedy) or more, each once")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k_keeps_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 keeps no token; -1 keeps all")
        return value


class CalibrationSection(Section):
    """Sequential Temperature Scaling of the confidences, from an evaluation's recorded rounds."""

    rounds: str | None = None
    """Folder of the evaluation whose rounds to use, and where the result goes; null: evaluation's own."""
    temperatures: tuple[float, ...] = ()
    """Fit on rounds of these sampling temperatures; empty: on all."""
    check_fraction: float = Field(default=0.5, ge=0, lt=1)
    """Share of the prompts, chosen by a hash of their ids, that is kept out of the fit to measure its effect."""
    min_rounds: int = Field(default=1000, gt=0)
    """Fitting on fewer rounds than this is warned about: an ECE of few rounds is mostly noise."""
    write_config: bool = True
    """Put the temperatures into the drafter's config.json. No engine reads them today; our own decoding does."""
    folded: str | None = None
    """Also write a drafter to this folder whose confidence head is divided by one temperature for all positions: what
    engines that read no temperatures can use. null: none."""
