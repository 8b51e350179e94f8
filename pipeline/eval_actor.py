"""One evaluation worker: the target, its heads and the drafters in one process, decoding prompts turn by turn.

Ray is not imported here: `PromptDecoder` works on any Verifier, and `load_decoder` builds the real one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.decoding.speculative import DecodeConfig, DecodeResult, Verifier, speculative_decode, target_decode
from model.drafter import DSparkDrafter
from model.export import load_drafter
from model.target_heads import TargetHeads, load_target_heads
from pipeline.acceptance import TARGET_ALONE, DecodeRow, RoundRow
from pipeline.chat import Chat, History, RenderError, row_seed
from pipeline.config import TargetSection
from pipeline.engines.hf import HfVerifier, load_target, resolve_target, tokenizer_of
from pipeline.prompts import Prompt

TRAINED, UNTRAINED = "trained", "untrained"
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


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One prompt at one temperature; `with_target`: the target decodes it alone as well."""

    prompt: Prompt
    temperature: float
    with_target: bool


@dataclass(slots=True)
class TaskResult:
    """What a task measured. `rejected` says why turns are missing."""

    rounds: list[RoundRow] = field(default_factory=list)
    decodes: list[DecodeRow] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Turn:
    """Labels of everything measured on one turn of a task."""

    task: EvalTask
    number: int

    def labels(self, drafter: str) -> dict[str, Any]:
        prompt = self.task.prompt
        return {
            "drafter": drafter,
            "temperature": self.task.temperature,
            "domain": prompt.domain or NO_DOMAIN,
            "prompt_id": prompt.sample_id,
            "turn": self.number,
        }


class PromptDecoder:
    """Decodes tasks with every drafter, and with the target alone where a task asks for it."""

    def __init__(
        self, verifier: Verifier, heads: TargetHeads, drafters: Mapping[str, DSparkDrafter], recipe: EvalRecipe
    ) -> None:
        self._verifier, self._heads, self._drafters, self._recipe = verifier, heads, dict(drafters), recipe

    def run(self, task: EvalTask, chat: Chat) -> TaskResult:
        """Decode the turns of a prompt one after another; the history is what the first decoder answered.

        A turn that the template refuses, that leaves no room, or whose predecessor was cut, ends the prompt: it and
        the turns behind it are listed in `rejected`.
        """
        result = TaskResult()
        context: list[int] = []
        answers: list[str] = []
        for number in range(len(task.prompt.users)):
            try:
                context = self._context(task.prompt, number, context, (answers, chat))
            except RenderError as error:
                missing = len(task.prompt.users) - number
                result.rejected += [f"{task.prompt.sample_id} turn {number}: {error}"] * missing
                break
            answer = self.decode(context, Turn(task, number), result)
            context = [*context, *answer]
            answers.append(chat.answer_text(answer))
        return result

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

    def decode(self, context: Sequence[int], turn: Turn, result: TaskResult) -> list[int]:
        """Decode one context with every decoder into `result`; returns the first drafter's tokens."""
        recipe, task = self._recipe, turn.task
        config = DecodeConfig(
            max_new_tokens=recipe.max_new_tokens,
            temperature=task.temperature,
            stop_ids=frozenset(recipe.stop_ids),
            seed=row_seed(recipe.seed, task.prompt.sample_id, turn.number),
        )
        first: list[int] = []
        for name, drafter in self._drafters.items():
            decoded = speculative_decode(self._verifier, drafter, self._heads, context, config)
            first = first or decoded.output_ids
            labels = turn.labels(name)
            result.decodes.append(_decode_row(decoded, labels, len(context), recipe.stop_ids))
            result.rounds += [
                RoundRow(
                    **labels,
                    position=r.position,
                    proposed=r.proposed,
                    accepted=r.accepted,
                    emitted=r.emitted,
                    draft_ids=r.draft_ids,
                    confidences=r.confidences,
                )
                for r in decoded.rounds
            ]
        if task.with_target:
            decoded = target_decode(self._verifier, context, config)
            labels = turn.labels(TARGET_ALONE)
            result.decodes.append(_decode_row(decoded, labels, len(context), recipe.stop_ids))
        return first

    def warm_up(self, context: Sequence[int]) -> None:
        """Run every decoder once, briefly: first calls allocate and compile, which is not decoding time."""
        config = DecodeConfig(max_new_tokens=_WARM_UP_TOKENS, temperature=0.0, stop_ids=frozenset(), seed=0)
        for drafter in self._drafters.values():
            speculative_decode(self._verifier, drafter, self._heads, context, config)
        target_decode(self._verifier, context, config)


def _decode_row(
    decoded: DecodeResult, labels: dict[str, Any], prompt_tokens: int, stop_ids: Sequence[int]
) -> DecodeRow:
    return DecodeRow(
        **labels,
        prompt_tokens=prompt_tokens,
        output_ids=tuple(decoded.output_ids),
        finish="stop" if decoded.output_ids[-1] in stop_ids else "length",
        rounds=len(decoded.rounds),
        prefill_seconds=decoded.seconds.prefill,
        draft_seconds=decoded.seconds.draft,
        verify_seconds=decoded.seconds.verify,
    )


def load_drafters(recipe: EvalRecipe) -> dict[str, DSparkDrafter]:
    """The exported drafter and, if asked for, the same architecture with the weights training started from.

    Raises CheckpointError when the folder is not a drafter.
    """
    trained = load_drafter(recipe.drafter).to(recipe.device)
    drafters = {TRAINED: trained}
    if recipe.untrained_seed is not None:
        fresh = DSparkDrafter(trained.config).init_weights(recipe.untrained_seed)
        drafters[UNTRAINED] = fresh.to(recipe.device, trained.dtype)
    return drafters


def load_decoder(recipe: EvalRecipe) -> PromptDecoder:
    """Target, heads and drafters on the recipe's device. Raises ConfigError and CheckpointError."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    drafters = load_drafters(recipe)
    trained = drafters[TRAINED]
    folder: Path = resolve_target(recipe.target)
    heads = load_target_heads(folder, dtype=trained.dtype, device=recipe.device)
    verifier = HfVerifier(load_target(recipe.target, recipe.device), trained.config.target_layer_ids)
    return PromptDecoder(verifier, heads, drafters, recipe)


class EvalActor:
    """The Ray actor's body: everything is loaded once, then tasks come one by one."""

    def __init__(self, recipe: EvalRecipe) -> None:
        self._chat = Chat(tokenizer_of(recipe.target), recipe.template_kwargs, recipe.stop_ids)
        self._decoder = load_decoder(recipe)
        self._decoder.warm_up(self._chat.prompt_ids(None, ["Hello"], []))

    def run(self, task: EvalTask) -> TaskResult:
        """Decode one task."""
        return self._decoder.run(task, self._chat)


def default_threads(num_actors: int) -> int:
    """CPU threads of an actor when the config names none: this machine's cores, shared. Ray alone would give one."""
    return max(1, len(os.sched_getaffinity(0)) // num_actors)
