"""What the Ray half of an evaluation does with parts that come in any order, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import eval_run
from pipeline.errors import EvaluationFailed
from pipeline.eval_actor import EvalTask, TaskResult
from pipeline.telemetry import Progress
from tests.pipeline.test_acceptance import make_decode, make_round
from tests.pipeline.test_eval_actor import make_prompt


def test_results_stand_in_the_order_of_the_tasks() -> None:
    tasks = [EvalTask(make_prompt(i), t, with_baselines=True) for i in range(2) for t in (0.0, 1.0)]
    parts = [
        TaskResult(
            rounds=[make_round(k, prompt=p, temperature=t, round=k) for k in range(2)],
            decodes=[make_decode(d, (1,), prompt_id=p, temperature=t) for d in ("trained", "target")],
        )
        for p in ("p1", "p0")
        for t in (1.0, 0.0)
    ]
    measured = [eval_run.Measured(), eval_run.Measured()]
    for found, order in zip(measured, (parts, parts[::-1]), strict=True):
        for part in order:
            found.add(part)
        found.sort(tasks)
    assert measured[0] == measured[1]
    assert [(r.prompt_id, r.temperature, r.round) for r in measured[0].rounds[:4]] == [
        ("p0", 0.0, 0),
        ("p0", 0.0, 1),
        ("p0", 1.0, 0),
        ("p0", 1.0, 1),
    ]


def test_actors_that_say_nothing_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "wait", lambda streams, **_: ([], streams))
    watch = eval_run._Watch(Progress("evaluate", 1, unit="answers"), stall_timeout_s=8.0)
    assert watch.ready(["stream"]) == []
    watch.add(TaskResult(done=1))  # something came: the clock starts again
    assert watch.ready(["stream"]) == []
    with pytest.raises(EvaluationFailed, match="no answer finished for 10 s"):
        watch.ready(["stream"])
