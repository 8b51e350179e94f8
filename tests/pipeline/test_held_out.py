"""Which prompts an evaluation takes, how it cuts them into chunks, and which were trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.held_out import find_leak, make_chunks, make_tasks, read_held_out
from tests.pipeline.test_eval_actor import make_prompt
from tests.pipeline.test_evaluate import ROWS, evaluation

__all__ = ["evaluation"]


def test_the_first_prompts_of_each_domain_are_taken_in_order(evaluation: Callable[..., Config]) -> None:
    rows = [*ROWS, {"id": "bad", "messages": []}, {"id": "none", "prompt": "no domain"}]
    held_out = read_held_out(evaluation(rows, limit_per_domain=2))
    assert [p.sample_id for p in held_out.prompts] == ["a-0", "a-1", "b-0", "b-1", "none"]
    assert len(held_out.rejected) == 1
    assert "held_out.jsonl:7" in held_out.rejected[0]


def test_no_usable_prompt_is_an_error_with_the_first_reason(evaluation: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"no usable prompt in 1 rows; the first: .*held_out\.jsonl:1"):
        read_held_out(evaluation([{"id": "bad", "messages": []}]))


def test_tasks_cover_prompts_and_temperatures_and_bound_the_targets_share() -> None:
    prompts = [make_prompt(0), make_prompt(1), replace(make_prompt(2), domain="code")]
    tasks = list(make_tasks(prompts, (0.0, 1.0), 1))
    assert [(t.prompt.sample_id, t.temperature, t.with_baselines) for t in tasks] == [
        ("p0", 0.0, True),
        ("p0", 1.0, True),
        ("p1", 0.0, False),
        ("p1", 1.0, False),
        ("p2", 0.0, True),
        ("p2", 1.0, True),
    ]
    assert all(task.with_baselines for task in make_tasks(prompts, (0.0,), None))


def test_chunks_hold_one_temperature_and_occupy_every_actor() -> None:
    tasks = list(make_tasks([make_prompt(i) for i in range(10)], (0.0, 1.0), None))
    chunks = make_chunks(tasks, num_actors=3, batch_size=2)
    assert [len(chunk) for chunk in chunks] == [4, 4, 2, 4, 4, 2]
    assert all(len({task.temperature for task in chunk}) == 1 for chunk in chunks)
    assert sorted(repr(task) for chunk in chunks for task in chunk) == sorted(map(repr, tasks))
    assert max(len(chunk) for chunk in make_chunks(tasks, num_actors=1, batch_size=1)) == 4


def test_prompts_that_were_trained_on_are_named(evaluation: Callable[..., Config], tmp_path: Path) -> None:
    training = tmp_path / "training.jsonl"
    training.write_text('{"id": "x", "prompt": "B  1"}\n{"id": "y", "turns": ["A 2", "more"]}\n{"broken"\n')
    config = evaluation(ROWS)
    prompts = config.prompts.model_copy(update={"sources": (str(training),)})
    config = config.model_copy(update={"prompts": prompts})
    leak = find_leak(config, read_held_out(config).prompts)
    assert (leak.compared, leak.prompt_ids, leak.problem) == (3, ("a-2", "b-1"), None)
    gone = config.model_copy(update={"prompts": prompts.model_copy(update={"sources": ("nowhere.jsonl",)})})
    assert "nowhere.jsonl: no such file" in (find_leak(gone, read_held_out(config).prompts).problem or "")
