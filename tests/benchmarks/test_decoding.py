"""The decoding benchmark on the tiny golden target: batches change the rate, never the answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.decoding import measure, same_answers
from pipeline.eval_actor import TRAINED, EvalTask, PromptDecoder, Turn
from pipeline.eval_run import Measured
from tests.model.decoding.test_speculative import FITTED, load_run
from tests.pipeline.test_acceptance import make_decode
from tests.pipeline.test_eval_actor import make_prompt, make_recipe
from tests.tiny_target import tiny_verifier

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_batch_size_decodes_the_same() -> None:
    drafter, heads = load_run(FITTED)
    recipe = make_recipe(stop_ids=(), max_new_tokens=10)
    rng = np.random.default_rng(0)
    turns = [
        Turn(EvalTask(make_prompt(i), 0.0, with_baselines=True), 0, tuple(rng.integers(0, 199, size=3 + i).tolist()))
        for i in range(4)
    ]
    measurements = []
    for batch_size in (1, 4):
        decoder = PromptDecoder(tiny_verifier(), heads, {TRAINED: drafter}, replace(recipe, batch_size=batch_size))
        result, measured = measure(decoder, turns, batch_size)
        measurements.append((result, measured))
        assert result.rounds == len(measured.rounds)
        assert result.rounds_per_second > 0
        emitted = [row.emitted for row in measured.rounds]
        assert result.accepted_length == pytest.approx(np.mean(emitted))
    (one, first), (four, second) = measurements
    assert (one.rounds, one.accepted_length) == (four.rounds, four.accepted_length)
    assert same_answers(first, second)


def test_a_changed_answer_is_noticed() -> None:
    left, right = (Measured(decodes=[make_decode(TRAINED, (1, 2, last))]) for last in (3, 4))
    assert not same_answers(left, right)
