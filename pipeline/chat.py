"""Render conversations with the target's own chat template, and know which template rewrites its history.

Token ids of answers are never made from text: a later turn's context is the earlier ids plus the tokens of what the
template puts between an answer and the next one. That is only right for a template that appends; one that rewrites
old turns (drops their reasoning, strips whitespace, adds an empty think block only at the end) is detected by probes,
and then every turn becomes a sample of its own whose context is the true render.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2

from pipeline.errors import ConfigError

History = Literal["append", "rerender"]
# Old answers that history-rewriting templates are known to change: plain, with outer whitespace, with reasoning.
_PROBE_ANSWERS = ("ok", " ok \n", "<think>\nbecause\n</think>\n\nok")


class RenderError(ValueError):
    """The template refused this conversation, or did not extend its own earlier render."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A target's tokenizer and chat template, with the template's extra variables and the tokens that end a turn."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()

    def text(self, system: str | None, users: Sequence[str], answers: Sequence[str]) -> str:
        """The rendered conversation; it ends with the generation prompt when the last turn is the user's.

        Raises RenderError when the template raises.
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        for number, user in enumerate(users):
            messages.append({"role": "user", "content": user})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=len(answers) < len(users), **self.template_kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise RenderError(f"the chat template refused the conversation: {error}") from error

    def prompt_ids(self, system: str | None, users: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Token ids of the context in which the next answer is generated; all of it is context, never supervised."""
        return self.encode(self.text(system, users, answers))

    def encode(self, text: str) -> list[int]:
        """Token ids of template text; the template itself writes the special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def delta_text(self, system: str | None, users: Sequence[str], answer: str = _PROBE_ANSWERS[0]) -> str:
        """What the template puts after the end-of-turn token of the last but one turn, up to the next answer.

        `users` holds at least two turns. Raises RenderError when the render with the answer does not continue the
        render before it: (context + generation prompt) + answer + end of turn.
        """
        answers = [answer] * (len(users) - 1)
        before = self.text(system, users[:-1], answers[:-1])
        after = self.text(system, users, answers)
        for stop in self.stop_ids:
            start = before + answer + self.tokenizer.decode([stop])
            if after.startswith(start):
                return after[len(start) :]
        raise RenderError("the chat template does not continue its own earlier render")

    def next_turn_ids(self, system: str | None, users: Sequence[str], so_far: Sequence[int]) -> list[int]:
        """Context ids of a later turn: `so_far` (context + generated ids, ending in a stop token) and the delta."""
        return [*so_far, *self.encode(self.delta_text(system, users))]

    def answer_text(self, generated: Sequence[int]) -> str:
        """A generated answer as text, without its end-of-turn token: for people, and for re-rendering templates."""
        ids = generated[:-1] if generated and generated[-1] in self.stop_ids else generated
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def detect_history(chat: Chat) -> History:
    """Whether the template only appends ("append") or rewrites earlier turns ("rerender").

    Raises ConfigError when it cannot render even one question.
    """
    try:
        chat.text(None, ["Hello"], [])
    except RenderError as error:
        raise ConfigError(f"target: {error}") from error
    users = ["first", "second"]
    for system in (None, "Be brief."):
        try:
            chat.text(system, users[:1], [])
        except RenderError:
            continue  # a family without system messages: those rows are rejected one by one
        for answer in _PROBE_ANSWERS:
            try:
                chat.delta_text(system, users, answer)
            except RenderError:
                return "rerender"
    return "append"


def row_seed(seed: int, sample_id: str, turn: int) -> int:
    """The sampling seed of one turn, 63 bits: the same whatever batch or engine it lands in."""
    digest = hashlib.sha256(json.dumps([seed, sample_id, turn]).encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
