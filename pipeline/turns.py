"""What the workers of a regeneration pass do: render a turn into a request, and record its answer or its failure.

History stays token ids: a later turn's context is what the engine saw and sampled before, and the template's delta.
With a template that rewrites history each turn is a sample of its own (`<id>#turn<k>`) on the true render.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from cache_store.ledger import Ledger, Reject
from cache_store.storage import Storage
from pipeline.chat import Chat, History, RenderError, row_seed
from pipeline.config import Config, TargetSection
from pipeline.engines.hf import tokenizer_of
from pipeline.errors import ConfigError
from pipeline.prompt_store import PromptIndex, load_prompts
from pipeline.prompts import Prompt
from pipeline.responses import Place, Response, load_responses, write_responses

ERROR_COLUMN = "__inference_error__"
REQUEST_SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "turn": pa.int32(),
        "tokenized_prompt": pa.list_(pa.int32()),
        "max_tokens": pa.int32(),
        "seed": pa.int64(),
        "carry": pa.string(),
    }
)
_ANSWER_SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "turn": pa.int32(),
        "carry": pa.string(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "generated_tokens": pa.list_(pa.int32()),
        ERROR_COLUMN: pa.string(),
    }
)
# A sample needs its own end-of-turn token and one token before it to teach anything.
_MIN_ANSWER_TOKENS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the tasks of a pass need; travels to the workers."""

    storage: Storage
    target: TargetSection
    template_kwargs: dict[str, Any]
    stop_ids: tuple[int, ...]
    history: History
    max_length: int
    max_new_tokens: int
    seed: int
    truncated: Literal["keep", "drop"]

    @property
    def chat(self) -> Chat:
        """The target's tokenizer and template in this process."""
        return Chat(tokenizer_of(self.target), self.template_kwargs, self.stop_ids)


@dataclass(frozen=True, slots=True)
class Pending:
    """One turn to answer: where its prompt is, and the response to the turn before."""

    prompt: Place
    previous: Place | None


@dataclass(slots=True)
class Outcome:
    """What a task commits: responses, and rejects."""

    responses: list[Response] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)

    def commit(self, storage: Storage) -> None:
        """Rejects first: a crash in between repeats the turn, it never loses one."""
        if self.rejects:
            Ledger(storage).reject(self.rejects)
        write_responses(storage, self.responses)


def make_recipe(
    config: Config, storage: Storage, target: TargetSection, history: History, stop_ids: tuple[int, ...]
) -> Recipe:
    """The recipe of a build; `target` as workers see it."""
    return Recipe(
        storage=storage,
        target=target,
        template_kwargs=config.generation.chat_template_kwargs,
        stop_ids=stop_ids,
        history=history,
        max_length=config.max_length,
        max_new_tokens=config.generation.sampling.max_new_tokens,
        seed=config.generation.sampling.seed,
        truncated=config.generation.truncated,
    )


def unit_id(sample_id: str, turn: int, turns: int, history: History) -> str:
    """Id of the sample that a turn ends up in: the conversation's, or with a history-rewriting template its own."""
    return f"{sample_id}#turn{turn}" if history == "rerender" and turns > 1 else sample_id


def all_unit_ids(index: PromptIndex, history: History) -> list[str]:
    """Ids of every sample that the prompts ask for. Raises ConfigError when two of them would share one."""
    ids = [
        unit_id(sample_id, turn, turns, history)
        for sample_id, turns in zip(index.ids, index.turns, strict=True)
        for turn in range(turns if history == "rerender" else 1)
    ]
    if len(set(ids)) < len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise ConfigError(
            f"prompts.sources: the id {twice!r} of a row is also the id of a turn of another conversation; give one of "
            "them another id, and use another cache.url"
        )
    return ids


def render_requests(recipe: Recipe, turn: int, piece: Sequence[Pending]) -> pa.Table:
    """Requests (REQUEST_SCHEMA) of a piece of pending turns; turns that cannot be asked are committed as such here."""
    prompts = load_prompts(recipe.storage, [item.prompt for item in piece])
    places = [item.previous for item in piece if item.previous is not None]
    previous: list[Response | None] = [None] * len(piece)
    if places:
        previous = list(load_responses(recipe.storage, places))
    chat, outcome, requests = recipe.chat, Outcome(), []
    for prompt, before in zip(prompts, previous, strict=True):
        try:
            ids = context_ids(chat, recipe, prompt, before)
        except RenderError as error:
            fail_turn(recipe, outcome, _carry(prompt, before), turn, str(error))
            continue
        requests.append(
            {
                "sample_id": prompt.sample_id,
                "turn": turn,
                "tokenized_prompt": ids,
                "max_tokens": min(recipe.max_new_tokens, recipe.max_length - len(ids)),
                "seed": row_seed(recipe.seed, prompt.sample_id, turn),
                "carry": json.dumps(_carry(prompt, before)),
            }
        )
    outcome.commit(recipe.storage)
    return pa.Table.from_pylist(requests, schema=REQUEST_SCHEMA)


def context_ids(chat: Chat, recipe: Recipe, prompt: Prompt, before: Response | None) -> list[int]:
    """Token ids in front of the next answer. Raises RenderError when there is no such context, or no room behind it."""
    if before is None:
        ids = chat.prompt_ids(prompt.system, prompt.users[:1], [])
    elif recipe.history == "append":
        ids = chat.next_turn_ids(prompt.system, prompt.users[: before.turn + 2], before.token_ids)
    else:
        ids = chat.prompt_ids(prompt.system, prompt.users[: before.turn + 2], before.answers)
    if len(ids) + _MIN_ANSWER_TOKENS > recipe.max_length:
        raise RenderError(f"the context leaves no room for an answer within max_length {recipe.max_length}")
    return ids


def _carry(prompt: Prompt, before: Response | None) -> dict[str, Any]:
    """What goes along with a request, as JSON: engines must not need to understand it."""
    return {
        "sample_id": prompt.sample_id,
        "turns": len(prompt.users),
        "domain": prompt.domain,
        "spans": list(before.spans) if before else [],
        "finish_reasons": list(before.finish_reasons) if before else [],
        "answers": list(before.answers) if before else [],
    }


def to_answers(table: pa.Table) -> pa.Table:
    """The engine's rows with exactly the columns that `write_answers` reads: failed rows come with others."""
    columns = {
        name: table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
        for name in _ANSWER_SCHEMA.names
    }
    return pa.table({name: pa.array(columns[name], type=_ANSWER_SCHEMA.field(name).type) for name in columns})


def write_answers(recipe: Recipe, table: pa.Table) -> pa.Table:
    """Commit a batch of answers; returns one row of counts."""
    outcome = Outcome()
    counts = {"answers": 0, "failed": 0, "tokens": 0, "truncated": 0}
    chat = recipe.chat
    for row in table.to_pylist():
        carry, turn = json.loads(row["carry"]), row["turn"]
        generated = row["generated_tokens"] or []
        if problem := _answer_problem(row, generated):
            fail_turn(recipe, outcome, carry, turn, problem)
            counts["failed"] += 1
            continue
        counts["answers"] += 1
        counts["tokens"] += len(generated)
        counts["truncated"] += generated[-1] not in recipe.stop_ids
        finish_turn(recipe, outcome, chat, (carry, turn, row["prompt_token_ids"], generated))
    outcome.commit(recipe.storage)
    return pa.table({name: pa.array([value], type=pa.int64()) for name, value in counts.items()})


def _answer_problem(row: dict[str, Any], generated: Sequence[int]) -> str | None:
    if row[ERROR_COLUMN]:
        return f"the engine refused it: {row[ERROR_COLUMN]}"
    if len(generated) < _MIN_ANSWER_TOKENS:
        return f"the answer is empty ({len(generated)} token)"
    return None


def finish_turn(
    recipe: Recipe, outcome: Outcome, chat: Chat, answer: tuple[dict[str, Any], int, list[int], list[int]]
) -> None:
    """Record one answer: what it adds to its conversation, and whether more turns may follow."""
    carry, turn, prompt_ids, generated = answer
    cut = generated[-1] not in recipe.stop_ids
    if cut and recipe.truncated == "drop":
        # Whole conversations are dropped, with appended history; otherwise this turn's sample and those behind it.
        _reject(recipe, outcome, carry, turn, f"turn {turn}: the answer was cut at {len(generated)} tokens")
        return
    kept = carry["spans"] if recipe.history == "append" else []
    span = (len(prompt_ids), len(prompt_ids) + len(generated))
    more = turn + 1 < carry["turns"]
    reason = f"turn {turn}: the answer was cut at {len(generated)} tokens, so the conversation ends there"
    outcome.responses.append(
        Response(
            sample_id=carry["sample_id"],
            turn=turn,
            turns=carry["turns"],
            token_ids=[*prompt_ids, *generated],
            spans=[*((start, end) for start, end in kept), span],
            finish_reasons=[*carry["finish_reasons"], "length" if cut else "stop"],
            answers=[*carry["answers"], chat.answer_text(generated)],
            domain=carry["domain"],
            ended=reason if cut and more else None,
        )
    )
    if cut and more and recipe.history == "rerender":
        _reject(recipe, outcome, carry, turn + 1, reason)


def fail_turn(recipe: Recipe, outcome: Outcome, carry: dict[str, Any], turn: int, reason: str) -> None:
    """Record a turn that cannot be answered: earlier turns are kept, a first turn rejects the conversation."""
    reason = f"turn {turn}: {reason}"
    if turn == 0 or recipe.history == "rerender":
        _reject(recipe, outcome, carry, turn, reason)
        return
    outcome.responses.append(
        Response(
            sample_id=carry["sample_id"],
            turn=turn,
            turns=carry["turns"],
            token_ids=[],
            spans=[],
            finish_reasons=[],
            answers=[],
            domain=carry["domain"],
            ended=reason,
        )
    )


def _reject(recipe: Recipe, outcome: Outcome, carry: dict[str, Any], turn: int, reason: str) -> None:
    turns = carry["turns"]
    ids = {unit_id(carry["sample_id"], later, turns, recipe.history): None for later in range(turn, turns)}
    outcome.rejects += [Reject(sample_id=name, stage="regenerate", reason=reason, source=None) for name in ids]
