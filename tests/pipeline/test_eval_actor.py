"""One evaluation worker on tiny real targets: losslessness, turns, and what a task records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.drafter import DSparkDrafter
from model.export import save_drafter
from pipeline.acceptance import TARGET_ALONE, check_greedy
from pipeline.chat import Chat
from pipeline.config import TargetSection
from pipeline.engines.hf import tokenizer_of
from pipeline.eval_actor import (
    TRAINED,
    UNTRAINED,
    EvalActor,
    EvalRecipe,
    EvalTask,
    PromptDecoder,
    TaskResult,
    Turn,
    count_answers,
    default_threads,
    load_drafters,
)
from pipeline.eval_run import Measured
from pipeline.prompts import Prompt
from tests.golden_data import drafter_config, read_json, tiny_heads
from tests.model.decoding.test_speculative import load_run
from tests.pipeline.hf_target import HIDDEN, LAYERS, VOCAB
from tests.tiny_target import tiny_verifier

END = 2  # <|im_end|> of the golden tokenizer


def make_recipe(**changes: Any) -> EvalRecipe:
    fields: dict[str, Any] = {
        "target": TargetSection(path="unused", dtype="float32"),
        "drafter": "unused",
        "untrained_seed": None,
        "template_kwargs": {},
        "history": "append",
        "stop_ids": (END,),
        "max_new_tokens": 16,
        "max_length": 256,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
        "batch_size": 3,
        "top_p": 1.0,
        "top_k": -1,
        "confidence_threshold": 0.0,
    }
    return EvalRecipe(**{**fields, **changes})


def make_prompt(number: int = 0, *users: str) -> Prompt:
    return Prompt(sample_id=f"p{number}", system=None, users=users or ("Hi",), domain="chat", source="")


@pytest.fixture(scope="module")
def exported(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalRecipe:
    """A recipe over the tiny Hugging Face target and a random exported drafter."""
    config = drafter_config(
        hidden_size=HIDDEN, vocab_size=VOCAB, target_layer_ids=(0, 2), num_target_layers=LAYERS, mask_token_id=3
    )
    folder = save_drafter(tmp_path_factory.mktemp("drafter"), DSparkDrafter(config).init_weights(1), {})
    target = TargetSection(path=str(tiny_target), dtype="float32")
    return make_recipe(target=target, drafter=str(folder), untrained_seed=5)


def collect(parts: Iterable[TaskResult]) -> Measured:
    measured = Measured()
    for part in parts:
        measured.add(part)
    return measured


def test_greedy_answers_of_a_fitted_drafter_equal_the_targets_on_50_prompts() -> None:
    run = next(r for r in read_json("decode/decode.json")["runs"] if r["drafter"] == "fitted")
    drafter, heads = load_run(run)
    random = DSparkDrafter(drafter.config).init_weights(3)
    drafters = {TRAINED: drafter, UNTRAINED: random}
    recipe = make_recipe(stop_ids=(7,), max_new_tokens=8, batch_size=8)
    decoder = PromptDecoder(tiny_verifier(), heads, drafters, recipe)
    rng, turns = np.random.default_rng(0), []
    for number in range(50):
        context = rng.integers(0, 199, size=rng.integers(1, 24)).tolist()
        turns.append(Turn(EvalTask(make_prompt(number), 0.0, with_baselines=True), 0, tuple(context)))
    measured = collect(decoder.measure(turns))
    checks = {check.drafter: check for check in check_greedy(measured.decodes)}
    assert [(c.compared, c.equal) for c in checks.values()] == [(50, 50), (50, 50)]
    accepted = [r.accepted for r in measured.rounds if r.drafter == TRAINED]
    assert 0 in accepted  # rejections and acceptances both happened
    assert max(accepted) >= 2


def test_a_task_records_every_round_of_every_drafter() -> None:
    drafter = DSparkDrafter(drafter_config(block_size=3)).init_weights(0)
    decoder = PromptDecoder(tiny_verifier(), tiny_heads(), {TRAINED: drafter}, make_recipe(stop_ids=()))
    result = collect(decoder.measure([Turn(EvalTask(make_prompt(), 1.0, with_baselines=False), 0, (1, 2, 3, 4))]))
    [row] = result.decodes
    assert (row.drafter, row.temperature, row.domain, row.prompt_id, row.turn) == (TRAINED, 1.0, "chat", "p0", 0)
    assert (row.prompt_tokens, len(row.output_ids), row.finish, row.rounds) == (4, 16, "length", len(result.rounds))
    # Each round starts where the committed tokens end; prefill gave the first.
    positions = [4 + sum(r.emitted for r in result.rounds[:i]) for i in range(len(result.rounds))]
    assert [r.position for r in result.rounds] == positions
    assert [r.round for r in result.rounds] == list(range(len(result.rounds)))
    assert all(len(r.draft_ids) == 3 and r.proposed == 3 for r in result.rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_measurements_do_not_depend_on_the_batch_size(temperature: float, exported: EvalRecipe) -> None:
    prompts = [make_prompt(number, "What is " + "2 + " * number + "2?") for number in range(5)]
    tasks = [EvalTask(prompt, temperature, with_baselines=True) for prompt in prompts]

    def answers(batch_size: int) -> list[tuple[str, str, tuple[int, ...]]]:
        measured = collect(EvalActor(replace(exported, batch_size=batch_size, top_p=0.9)).run(tasks))
        measured.sort(tasks)
        return [(d.prompt_id, d.drafter, d.output_ids) for d in measured.decodes]

    assert answers(1) == answers(4)


def test_the_exported_config_decides_and_the_untrained_twin_has_the_training_seed(exported: EvalRecipe) -> None:
    drafters = load_drafters(exported)
    assert list(drafters) == [TRAINED, UNTRAINED]
    assert drafters[UNTRAINED].config == drafters[TRAINED].config
    wanted = DSparkDrafter(drafters[TRAINED].config).init_weights(5)
    assert drafters[UNTRAINED].fc.weight.equal(wanted.fc.weight)
    assert list(load_drafters(replace(exported, untrained_seed=None))) == [TRAINED]


def test_an_actor_decodes_a_rendered_prompt_with_all_three(exported: EvalRecipe) -> None:
    task = EvalTask(make_prompt(0, "What is 2 + 2?"), 0.0, with_baselines=True)
    parts = list(EvalActor(exported).run([task]))
    result = collect(parts)
    chat = Chat(tokenizer_of(exported.target), {}, (END,))
    assert [d.drafter for d in result.decodes] == [TRAINED, UNTRAINED, TARGET_ALONE]
    assert {d.prompt_tokens for d in result.decodes} == {len(chat.prompt_ids(None, ["What is 2 + 2?"], []))}
    assert all(check.equal == check.compared == 1 for check in check_greedy(result.decodes))
    assert sum(part.done for part in parts) == count_answers([task], 2) == 3


def test_later_turns_continue_the_answer_or_are_counted_as_missing(exported: EvalRecipe) -> None:
    # Every token stops, so each answer is one token long and every turn is reached.
    prompts = [make_prompt(0, "one", "two", "three"), make_prompt(1, "four"), make_prompt(2, "five", "six")]
    tasks = [EvalTask(prompt, 0.0, with_baselines=number != 1) for number, prompt in enumerate(prompts)]
    everything = replace(exported, stop_ids=tuple(range(VOCAB)), history="rerender", batch_size=2)
    result = collect(EvalActor(everything).run(tasks))
    result.sort(tasks)
    mine = [d for d in result.decodes if d.drafter == TRAINED]
    assert [(d.prompt_id, d.turn) for d in mine] == [("p0", 0), ("p0", 1), ("p0", 2), ("p1", 0), ("p2", 0), ("p2", 1)]
    for baseline in (UNTRAINED, TARGET_ALONE):
        found = [(d.prompt_id, d.turn) for d in result.decodes if d.drafter == baseline]
        assert found == [("p0", 0), ("p0", 1), ("p0", 2), ("p2", 0), ("p2", 1)]
    assert result.rejected == []
    lengths = [d.prompt_tokens for d in mine[:3]]
    assert lengths[0] < lengths[1] < lengths[2]
    # No token stops: the first answer is cut, the two turns behind it are named.
    parts = list(EvalActor(replace(exported, stop_ids=())).run(tasks[:1]))
    cut = collect(parts)
    assert [d.turn for d in cut.decodes if d.drafter == TRAINED] == [0]
    assert len(cut.rejected) == 2
    assert "was cut at 16 tokens" in cut.rejected[0]
    assert sum(part.done for part in parts) == count_answers(tasks[:1], 2)


def test_tasks_with_baselines_are_decoded_by_themselves_and_first(exported: EvalRecipe) -> None:
    tasks = [EvalTask(make_prompt(number), 0.0, with_baselines=number % 2 == 1) for number in range(4)]
    decodes = [d for part in EvalActor(exported).run(tasks) for d in part.decodes]
    order = [(d.drafter, d.prompt_id) for d in decodes]
    alone = {(TRAINED, "p0"), (TRAINED, "p2")}
    assert set(order[-2:]) == alone
    assert not alone & set(order[:-2])
    assert len(order) == 2 * 3 + 2


def test_a_later_turns_context_is_the_first_drafters_answer(exported: EvalRecipe) -> None:
    chat = Chat(tokenizer_of(exported.target), {}, tuple(range(VOCAB)))
    task = EvalTask(make_prompt(0, "one", "two"), 0.0, with_baselines=True)
    recipe = replace(exported, stop_ids=tuple(range(VOCAB)), history="append")
    result = collect(EvalActor(recipe).run([task]))
    result.sort([task])
    first, second = (d for d in result.decodes if d.drafter == TRAINED)
    so_far = [*chat.prompt_ids(None, ["one"], []), *first.output_ids]
    assert second.prompt_tokens == len(so_far) + len(chat.encode(chat.delta_text(None, ["one", "two"])))
    assert [d.prompt_tokens for d in result.decodes if d.turn == 1] == [second.prompt_tokens] * 3


def test_a_prompt_without_room_is_rejected_with_its_numbers(exported: EvalRecipe) -> None:
    task = EvalTask(make_prompt(), 0.0, with_baselines=True)
    result = collect(EvalActor(replace(exported, max_length=20)).run([task]))
    assert result.decodes == []
    assert "exceed max_length 20" in result.rejected[0]


def test_default_threads_share_the_machine() -> None:
    assert default_threads(1) >= default_threads(2) >= default_threads(10_000) == 1
