"""Multi-turn accounting without Ray: the tasks of a pass, called one after another with an engine of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache_store.ledger import Ledger
from cache_store.storage import open_storage
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.identity import check_target
from pipeline.prompt_store import PromptIndex, load_index, publish_prompts, spool_prompts
from pipeline.regenerate import find_pending, sample_places
from pipeline.responses import Response, load_responses
from pipeline.turns import (
    ERROR_COLUMN,
    Recipe,
    all_unit_ids,
    make_recipe,
    render_requests,
    to_answers,
    write_answers,
)

STOP = 2
Answer = Callable[[dict[str, Any]], "list[int] | str"]
MakeConfig = Callable[..., Config]


def conversation(name: str, turns: int, text: str = "hi") -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{text} {turn}"}, {"role": "assistant", "content": "ORIGINAL"}]
    return {"id": name, "messages": messages[:-1]}


@pytest.fixture
def start(make_config: MakeConfig, tmp_path: Path) -> Callable[..., tuple[Recipe, PromptIndex]]:
    def make(rows: Sequence[Any], *, history: str = "append", **sections: Any) -> tuple[Recipe, PromptIndex]:
        config = make_config(rows, **sections)
        storage = open_storage(config.cache.url)
        target = check_target(config)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        publish_prompts(storage, spool_prompts(config, scratch, keep_first=1))
        recipe = make_recipe(config, storage, target.section, target.history, target.stop_ids)
        return replace(recipe, history=history), load_index(storage)  # type: ignore[arg-type]

    return make


def run(recipe: Recipe, index: PromptIndex, answer: Answer) -> None:
    """Every pass in this process; `answer(request)` gives the generated ids, or an error text."""
    for turn in range(max(index.turns)):
        pending, _ = find_pending(recipe, index, turn)
        rows = []
        for request in render_requests(recipe, turn, pending).to_pylist():
            result = answer(request)
            good = isinstance(result, list)
            rows.append(
                {
                    "sample_id": request["sample_id"],
                    "turn": turn,
                    "carry": request["carry"],
                    "prompt_token_ids": request["tokenized_prompt"] if good else None,
                    "generated_tokens": result if good else [],
                    ERROR_COLUMN: "" if good else result,
                }
            )
        if rows:
            write_answers(recipe, to_answers(pa.Table.from_pylist(rows)))
        assert find_pending(recipe, index, turn)[0] == []


def responses(recipe: Recipe, index: PromptIndex) -> dict[str, Response]:
    places = sample_places(recipe, index, Ledger(recipe.storage).rejected().keys())
    return dict(zip(places, load_responses(recipe.storage, list(places.values())), strict=True))


def counting(request: dict[str, Any]) -> list[int]:
    """An answer that says which turn it is: the token 40 + turn, twice, and the end of turn."""
    return [40 + request["turn"]] * 2 + [STOP]


def everything(recipe: Recipe, index: PromptIndex) -> set[str]:
    done = responses(recipe, index).keys() | Ledger(recipe.storage).rejected().keys()
    assert done == {*all_unit_ids(index, recipe.history), *index.rejected_ids}
    return set(done)


def test_later_turns_stand_on_the_regenerated_ones(start: Callable[..., Any]) -> None:
    recipe, index = start([conversation("a", 3), conversation("b", 1)])
    run(recipe, index, counting)
    assert everything(recipe, index) == {"a", "b"}
    found = responses(recipe, index)["a"]
    assert [found.token_ids[begin:end] for begin, end in found.spans] == [[40, 40, 2], [41, 41, 2], [42, 42, 2]]
    assert found.finish_reasons == ["stop"] * 3
    text = recipe.chat.tokenizer.decode(found.token_ids)
    assert "ORIGINAL" not in text
    assert [text.index(f"hi {turn}") for turn in range(3)] == sorted(text.index(f"hi {turn}") for turn in range(3))
    assert len(responses(recipe, index)["b"].spans) == 1


def test_answers_stay_the_engines_tokens(start: Callable[..., Any]) -> None:
    recipe, index = start([conversation("a", 2)])
    newline = recipe.chat.encode("\n")
    run(recipe, index, lambda request: [*newline, *newline, *newline, STOP])
    found = responses(recipe, index)["a"]
    assert all(found.token_ids[begin:end] == [*newline, *newline, *newline, STOP] for begin, end in found.spans)


def test_a_rewriting_template_makes_one_sample_per_turn(start: Callable[..., Any]) -> None:
    recipe, index = start([conversation("a", 3), conversation("b", 1)], history="rerender")
    run(recipe, index, counting)
    assert everything(recipe, index) == {"a#turn0", "a#turn1", "a#turn2", "b"}
    found = responses(recipe, index)
    chat = recipe.chat
    answers = [chat.tokenizer.decode([40 + turn] * 2) for turn in range(2)]
    users = ["hi 0", "hi 1", "hi 2"]
    for turn in range(3):
        context = chat.prompt_ids(None, users[: turn + 1], answers[:turn])
        sample = found[f"a#turn{turn}"]
        assert sample.token_ids == [*context, *[40 + turn] * 2, STOP]
        assert sample.spans == [(len(context), len(context) + 3)]


def test_a_rows_own_id_is_not_taken_for_a_turn(start: Callable[..., tuple[Recipe, PromptIndex]]) -> None:
    _, index = start([conversation("a", 2), conversation("a#turn1", 1)])
    assert all_unit_ids(index, "append") == ["a", "a#turn1"]
    with pytest.raises(ConfigError, match="the id 'a#turn1' of a row is also the id of a turn"):
        all_unit_ids(index, "rerender")


@pytest.mark.parametrize("history", ["append", "rerender"])
@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_cut_answers_follow_the_policy(start: Callable[..., Any], history: str, policy: str) -> None:
    rows = [conversation("cut", 3), conversation("whole", 1)]
    recipe, index = start(rows, history=history, generation={"truncated": policy})
    run(recipe, index, lambda r: [7] * 4 if r["sample_id"] == "cut" and r["turn"] == 1 else counting(r))
    everything(recipe, index)
    kept = responses(recipe, index)
    rejected = Ledger(recipe.storage).rejected()
    expected_kept, expected_rejected = {
        ("append", "keep"): ({"cut", "whole"}, set()),
        ("append", "drop"): ({"whole"}, {"cut"}),
        ("rerender", "keep"): ({"cut#turn0", "cut#turn1", "whole"}, {"cut#turn2"}),
        ("rerender", "drop"): ({"cut#turn0", "whole"}, {"cut#turn1", "cut#turn2"}),
    }[history, policy]
    assert (set(kept), set(rejected)) == (expected_kept, expected_rejected)
    assert all("turn 1: the answer was cut at 4 tokens" in reject.reason for reject in rejected.values())
    if (history, policy) == ("append", "keep"):
        assert kept["cut"].finish_reasons == ["stop", "length"]
        assert kept["cut"].ended is not None


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_an_engine_error_rejects_a_first_turn_and_ends_a_later_one(start: Callable[..., Any], history: str) -> None:
    rows = [conversation("first", 2), conversation("later", 2), conversation("good", 2)]
    recipe, index = start(rows, history=history)

    def answer(request: dict[str, Any]) -> list[int] | str:
        bad = {"first": 0, "later": 1}.get(request["sample_id"])
        return "ValueError: too odd" if request["turn"] == bad else counting(request)

    run(recipe, index, answer)
    everything(recipe, index)
    rejected = Ledger(recipe.storage).rejected()
    wanted = {"append": {"first"}, "rerender": {"first#turn0", "first#turn1", "later#turn1"}}[history]
    assert set(rejected) == wanted
    assert all("the engine refused it: ValueError: too odd" in reject.reason for reject in rejected.values())
    if history == "append":
        later = responses(recipe, index)["later"]
        assert (len(later.spans), later.finish_reasons) == (1, ["stop"])


def test_prompts_without_room_and_empty_answers_are_rejected(start: Callable[..., Any]) -> None:
    rows = [conversation("long", 1, "word " * 200), conversation("empty", 1), conversation("good", 1)]
    recipe, index = start(rows)
    run(recipe, index, lambda request: [STOP] if request["sample_id"] == "empty" else counting(request))
    everything(recipe, index)
    rejected = Ledger(recipe.storage).rejected()
    assert "no room for an answer within max_length 96" in rejected["long"].reason
    assert "the answer is empty" in rejected["empty"].reason
    assert set(responses(recipe, index)) == {"good"}


def test_answers_never_pass_max_length(start: Callable[..., Any]) -> None:
    recipe, index = start([conversation("a", 1)], max_length=24, generation={"sampling": {"max_new_tokens": 20}})
    (request,) = render_requests(recipe, 0, find_pending(recipe, index, 0)[0]).to_pylist()
    assert len(request["tokenized_prompt"]) + request["max_tokens"] == 24


def test_resume_asks_only_for_what_is_missing(start: Callable[..., Any]) -> None:
    recipe, index = start([conversation(f"c{n}", 1) for n in range(6)])
    pending, total = find_pending(recipe, index, 0)
    assert (len(pending), total) == (6, 6)
    rows = render_requests(recipe, 0, pending[1:4]).to_pylist()
    table = [{**row, "prompt_token_ids": row["tokenized_prompt"], "generated_tokens": [7, STOP]} for row in rows]
    write_answers(recipe, to_answers(pa.Table.from_pylist(table)))
    write_answers(recipe, to_answers(pa.Table.from_pylist(table)))  # a retried task: the same rows again
    left, total = find_pending(recipe, index, 0)
    assert ([index.ids[place.prompt[1]] for place in left], total) == (["c0", "c4", "c5"], 6)


def test_seeds_belong_to_rows_not_to_batches(start: Callable[..., Any]) -> None:
    recipe, index = start([conversation(f"c{n}", 1) for n in range(4)])
    pending, _ = find_pending(recipe, index, 0)
    together = {row["sample_id"]: row["seed"] for row in render_requests(recipe, 0, pending).to_pylist()}
    alone = {row["sample_id"]: row["seed"] for row in render_requests(recipe, 0, pending[2:3]).to_pylist()}
    assert alone == {"c2": together["c2"]}
    assert len(set(together.values())) == 4
