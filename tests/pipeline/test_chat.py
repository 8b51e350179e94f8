from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.chat import Chat, RenderError, detect_history, row_seed
from pipeline.errors import ConfigError
from tests.golden_data import GOLDEN

STOP = 2  # <|im_end|>
CHATML = Path(GOLDEN / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
TURN = "<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(content: str, *, head: str = "", generation: str = GENERATION) -> str:
    return head + "{% for m in messages %}" + TURN.replace("CONTENT", content) + "{% endfor %}" + generation


SHOUTING_USERS = template("m.content | upper if m.role == 'user' else m.content")
STRIPPING = template("m.content | trim")
DATED = template("m.content", head="<|im_start|>system\nToday is {{ strftime_now('%d %B') }}.<|im_end|>\n")
FORGETS_REASONING = template("m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content")
EMPTY_THINK = template("m.content", generation=GENERATION.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"))
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML


@pytest.fixture
def chat_of() -> Callable[..., Chat]:
    def make(text: str = CHATML, **kwargs: Any) -> Chat:
        tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tokenizer")
        tokenizer.chat_template = text
        return Chat(tokenizer, kwargs, (STOP,))

    return make


@pytest.mark.parametrize(
    ("text", "history"),
    [
        (CHATML, "append"),
        (SHOUTING_USERS, "append"),
        (DATED, "append"),
        (NO_SYSTEM, "append"),
        (STRIPPING, "rerender"),
        (FORGETS_REASONING, "rerender"),
        (EMPTY_THINK, "rerender"),
    ],
    ids=["chatml", "upper-case users", "date", "no system", "strips", "drops reasoning", "empty think block"],
)
def test_history_is_detected(chat_of: Callable[..., Chat], text: str, history: str) -> None:
    assert detect_history(chat_of(text)) == history


def test_a_template_that_cannot_render_is_refused(chat_of: Callable[..., Chat]) -> None:
    with pytest.raises(ConfigError, match="refused the conversation: broken today"):
        detect_history(chat_of("{{ raise_exception('broken today') }}"))


@pytest.mark.parametrize("text", [CHATML, SHOUTING_USERS, DATED])
def test_appended_context_is_the_true_render_around_the_engines_tokens(chat_of: Callable[..., Chat], text: str) -> None:
    chat = chat_of(text)
    users = ["What is two plus two?", "And three more?"]
    first = chat.prompt_ids("Be brief.", users[:1], [])
    answer = [*chat.encode("Four."), STOP]
    context = chat.next_turn_ids("Be brief.", users, [*first, *answer])
    assert context == chat.encode(chat.text("Be brief.", users, ["Four."]))


def test_generated_ids_are_never_tokenised_again(chat_of: Callable[..., Chat]) -> None:
    chat = chat_of()
    single = chat.encode("\n")
    odd = [*single, *single]  # not how a tokenizer with a merge would write "\n\n"
    first = chat.prompt_ids(None, ["a"], [])
    context = chat.next_turn_ids(None, ["a", "b"], [*first, *odd, STOP])
    assert context[len(first) : len(first) + len(odd) + 1] == [*odd, STOP]


def test_the_generation_prompts_think_block_is_context(chat_of: Callable[..., Chat]) -> None:
    with_block, without = chat_of(EMPTY_THINK), chat_of()
    assert with_block.text(None, ["a"], []).endswith("<think>\n\n</think>\n\n")
    ids, plain = with_block.prompt_ids(None, ["a"], []), without.prompt_ids(None, ["a"], [])
    assert ids[: len(plain)] == plain
    assert len(ids) > len(plain)  # all of it lies before the first generated, first supervised token


def test_a_rewriting_template_gives_no_delta(chat_of: Callable[..., Chat]) -> None:
    with pytest.raises(RenderError, match="does not continue"):
        chat_of(EMPTY_THINK).next_turn_ids(None, ["a", "b"], [1, STOP])


def test_a_refused_conversation_says_so(chat_of: Callable[..., Chat]) -> None:
    with pytest.raises(RenderError, match="no system here"):
        chat_of(NO_SYSTEM).prompt_ids("system", ["a"], [])


def test_template_variables_reach_the_template(chat_of: Callable[..., Chat]) -> None:
    text = "{{ mood }}" + CHATML
    assert chat_of(text, mood="calm").text(None, ["a"], []).startswith("calm")


def test_answer_text_ends_before_the_stop_token(chat_of: Callable[..., Chat]) -> None:
    chat = chat_of()
    ids = chat.encode("Four.")
    assert chat.answer_text([*ids, STOP]) == "Four."
    assert chat.answer_text(ids) == "Four."
    assert chat.answer_text([]) == ""


@given(st.integers(), st.text(), st.integers(0, 50))
def test_row_seeds_are_63_bits_and_fixed(seed: int, sample_id: str, turn: int) -> None:
    value = row_seed(seed, sample_id, turn)
    assert 0 <= value < 2**63
    assert value == row_seed(seed, sample_id, turn)
    assert value != row_seed(seed, sample_id, turn + 1)
