"""One evaluation worker: the target, its heads and the drafters in one process, decoding prompts in batches.

Ray is not imported here: `PromptDecoder` works on any Verifier, and `load_decoder` builds the real one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.decoding.chain_drafting import make_drafter
from model.decoding.speculative import BatchDecoder, DecodeConfig, DecodeResult, Request, Verifier, decode_all
from model.export import load_drafter
from model.family import AnyDrafter, new_drafter
from model.target_heads import TargetHeads, load_target_heads
from pipeline.acceptance import TARGET_ALONE, TRAINED, UNTRAINED, DecodeRow, RoundRow
from pipeline.chat import Chat, History, RenderError, row_seed
from pipeline.config import TargetSection
from pipeline.engines.hf import load_target, resolve_target, tokenizer_of
from pipeline.prompts import Prompt

_WARM_UP_TOKENS = 8
NO_DOMAIN = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecipe:
    """What an actor needs; travels to the workers."""

    target: TargetSection
    drafter: str
    """The exported folder: its own config.json decides shape, layers and layout, not the training config."""
    untrained_seed: int | None
    """Seed of the fresh drafter to measure beside it; null: none."""
    template_kwargs: dict[str, Any]
    history: History
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    max_length: int
    seed: int
    device: str
    threads: int | None
    batch_size: int
    top_p: float
    top_k: int
    confidence_threshold: float
    confidence_temperatures: tuple[float, ...] = ()
    """The drafter's calibration, which the threshold applies to."""


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One prompt at one temperature; `with_baselines`: the target alone and the untrained drafter decode it as well."""

    prompt: Prompt
    temperature: float
    with_baselines: bool


@dataclass(slots=True)
class TaskResult:
    """A part of what was measured. `rejected` says why turns are missing."""

    rounds: list[RoundRow] = field(default_factory=list)
    decodes: list[DecodeRow] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    done: int = 0
    """Answers that this part accounts for, rejected ones included; see `count_answers`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a task and the token ids in front of its answer."""

    task: EvalTask
    number: int
    context: tuple[int, ...]

    def labels(self, drafter: str) -> dict[str, Any]:
        """What is recorded beside everything measured on it."""
        prompt = self.task.prompt
        return {
            "drafter": drafter,
            "temperature": self.task.temperature,
            "domain": prompt.domain or NO_DOMAIN,
            "language": prompt.language or NO_DOMAIN,
            "prompt_id": prompt.sample_id,
            "turn": self.number,
        }


def count_answers(tasks: Iterable[EvalTask], drafters: int) -> int:
    """Answers that a full evaluation of the tasks decodes: turns times decoders, the first of `drafters` on all."""
    return sum(len(task.prompt.users) * (1 + drafters * task.with_baselines) for task in tasks)


class PromptDecoder:
    """Decodes tasks in batches with the first drafter, and with the baselines where a task says so."""

    def __init__(
        self, verifier: Verifier, heads: TargetHeads, drafters: Mapping[str, AnyDrafter], recipe: EvalRecipe
    ) -> None:
        self._verifier, self._heads, self._drafters, self._recipe = verifier, heads, dict(drafters), recipe

    def run(self, tasks: Sequence[EvalTask], chat: Chat) -> Iterator[TaskResult]:
        """Decode every turn of the tasks, which share a temperature; results come as answers end.

        The first drafter's answers are the history of later turns, for all decoders. A turn that the template refuses,
        that leaves no room, or whose predecessor was cut, ends its prompt: it and the turns behind it are listed in
        `rejected`. Tasks with baselines go first and by themselves, so that every decoder meets them in batches of the
        same size: only then do times compare.
        """
        for chosen in (True, False):
            group = [task for task in tasks if task.with_baselines is chosen]
            if group:
                yield from self._run(group, chat)

    def _run(self, tasks: Sequence[EvalTask], chat: Chat) -> Iterator[TaskResult]:
        reached: list[Turn] = []
        waiting: list[Turn] = []
        answers: dict[str, list[str]] = {}

        def open_turn(task: EvalTask, before: Turn | None, answer: Sequence[int]) -> TaskResult:
            number = before.number + 1 if before else 0
            so_far = [*before.context, *answer] if before else []
            try:
                context = self._context(task.prompt, number, so_far, (answers.get(task.prompt.sample_id, []), chat))
            except RenderError as error:
                missing = len(task.prompt.users) - number
                reasons = [f"{task.prompt.sample_id} turn {number}: {error}"] * missing
                return TaskResult(rejected=reasons, done=missing * (1 + len(self._drafters) * task.with_baselines))
            waiting.append(Turn(task, number, tuple(context)))
            return TaskResult()

        first = next(iter(self._drafters))
        yield from (open_turn(task, None, ()) for task in tasks)
        decoder = self._decoder(first, tasks[0].temperature)
        turns: dict[int, Turn] = {}
        while waiting or decoder.busy:
            turns |= {id(_submit(decoder, turn, self._recipe)): turn for turn in waiting}
            reached += waiting
            waiting.clear()
            for request, decoded in decoder.step():
                turn = turns[id(request)]
                yield self._result(turn, first, decoded)
                if turn.number + 1 < len(turn.task.prompt.users):
                    answers.setdefault(turn.task.prompt.sample_id, []).append(chat.answer_text(decoded.output_ids))
                    yield open_turn(turn.task, turn, decoded.output_ids)
        yield from self._others(first, reached)

    def measure(self, turns: Sequence[Turn]) -> Iterator[TaskResult]:
        """Decode given contexts, which share a temperature, with every decoder."""
        first = next(iter(self._drafters))
        yield from self._decode(first, turns)
        yield from self._others(first, turns)

    def _others(self, first: str, turns: Sequence[Turn]) -> Iterator[TaskResult]:
        chosen = [turn for turn in turns if turn.task.with_baselines]
        for name in [*self._drafters, TARGET_ALONE]:
            if name != first:
                yield from self._decode(name, chosen)

    def _decode(self, name: str, turns: Sequence[Turn]) -> Iterator[TaskResult]:
        if not turns:
            return
        decoder = self._decoder(name, turns[0].task.temperature)
        by_request = {id(_submit(decoder, turn, self._recipe)): turn for turn in turns}
        while decoder.busy:
            for request, decoded in decoder.step():
                yield self._result(by_request[id(request)], name, decoded)

    def _decoder(self, name: str, temperature: float) -> BatchDecoder:
        recipe = self._recipe
        config = DecodeConfig(
            max_new_tokens=recipe.max_new_tokens,
            temperature=temperature,
            top_p=recipe.top_p,
            top_k=recipe.top_k,
            stop_ids=frozenset(recipe.stop_ids),
            seed=recipe.seed,
            confidence_threshold=recipe.confidence_threshold,
            confidence_temperatures=recipe.confidence_temperatures,
        )
        drafter = make_drafter(self._drafters[name], self._heads) if name in self._drafters else None
        return BatchDecoder(self._verifier, drafter, config, batch_size=recipe.batch_size)

    def _context(
        self, prompt: Prompt, number: int, so_far: Sequence[int], history: tuple[list[str], Chat]
    ) -> list[int]:
        answers, chat = history
        if number == 0:
            ids = chat.prompt_ids(prompt.system, prompt.users[:1], [])
        elif so_far[-1] not in self._recipe.stop_ids:
            raise RenderError(f"the answer before it was cut at {self._recipe.max_new_tokens} tokens")
        elif self._recipe.history == "append":
            ids = chat.next_turn_ids(prompt.system, prompt.users[: number + 1], so_far)
        else:
            ids = chat.prompt_ids(prompt.system, prompt.users[: number + 1], answers)
        if len(ids) + self._recipe.max_new_tokens > self._recipe.max_length:
            raise RenderError(
                f"{len(ids)} tokens of context and {self._recipe.max_new_tokens} new ones exceed max_length "
                f"{self._recipe.max_length}"
            )
        return ids

    def _result(self, turn: Turn, name: str, decoded: DecodeResult) -> TaskResult:
        labels = turn.labels(name)
        rounds = [
            RoundRow(
                **labels,
                round=number,
                position=r.position,
                proposed=r.proposed,
                accepted=r.accepted,
                emitted=r.emitted,
                draft_ids=r.draft_ids,
                confidences=r.confidences,
            )
            for number, r in enumerate(decoded.rounds)
        ]
        row = DecodeRow(
            **labels,
            prompt_tokens=len(turn.context),
            output_ids=tuple(decoded.output_ids),
            finish="stop" if decoded.output_ids[-1] in self._recipe.stop_ids else "length",
            rounds=len(rounds),
            prefill_seconds=decoded.seconds.prefill,
            draft_seconds=decoded.seconds.draft,
            verify_seconds=decoded.seconds.verify,
        )
        return TaskResult(rounds=rounds, decodes=[row], done=1)

    def warm_up(self, context: Sequence[int]) -> None:
        """Run every decoder once, briefly: first calls allocate and compile, which is not decoding time."""
        config = DecodeConfig(max_new_tokens=_WARM_UP_TOKENS, temperature=0.0, stop_ids=frozenset(), seed=0)
        for drafter in [*self._drafters.values(), None]:
            block = make_drafter(drafter, self._heads) if drafter is not None else None
            decode_all(
                BatchDecoder(self._verifier, block, config, batch_size=self._recipe.batch_size),
                [Request(context) for _ in range(self._recipe.batch_size)],
            )


def _submit(decoder: BatchDecoder, turn: Turn, recipe: EvalRecipe) -> Request:
    request = Request(turn.context, seed=row_seed(recipe.seed, turn.task.prompt.sample_id, turn.number))
    decoder.submit(request)
    return request


def load_drafters(recipe: EvalRecipe) -> dict[str, AnyDrafter]:
    """The exported drafter and, if asked for, the same architecture with the weights training started from.

    Raises CheckpointError when the folder is not a drafter.
    """
    trained = load_drafter(recipe.drafter).to(recipe.device)
    drafters = {TRAINED: trained}
    if recipe.untrained_seed is not None:
        fresh = new_drafter(trained.config).init_weights(recipe.untrained_seed)
        fresh.draft_ids = trained.draft_ids
        drafters[UNTRAINED] = fresh.to(recipe.device, trained.dtype)
    return drafters


def load_decoder(recipe: EvalRecipe) -> PromptDecoder:
    """Target, heads and drafters on the recipe's device. Raises ConfigError and CheckpointError."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    drafters = load_drafters(recipe)
    trained = drafters[TRAINED]
    folder: Path = resolve_target(recipe.target)
    heads = load_target_heads(folder, dtype=trained.dtype, device=recipe.device, draft_ids=trained.draft_ids)
    from pipeline.engines.hf_verifier import HfVerifier

    verifier = HfVerifier(load_target(recipe.target, recipe.device), trained.config.target_layer_ids)
    return PromptDecoder(verifier, heads, drafters, recipe)


class EvalActor:
    """The Ray actor's body: everything is loaded once, then tasks come one by one."""

    def __init__(self, recipe: EvalRecipe) -> None:
        self._chat = Chat(tokenizer_of(recipe.target), recipe.template_kwargs, recipe.stop_ids)
        self._decoder = load_decoder(recipe)
        self._decoder.warm_up(self._chat.prompt_ids(None, ["Hello"], []))

    def run(self, tasks: Sequence[EvalTask]) -> Iterator[TaskResult]:
        """Decode tasks of one temperature, `batch_size` at a time; results come as answers end."""
        yield from self._decoder.run(tasks, self._chat)


def default_threads(num_actors: int) -> int:
    """CPU threads of an actor when the config names none: this machine's cores, shared. Ray alone would give one."""
    return max(1, len(os.sched_getaffinity(0)) // num_actors)
