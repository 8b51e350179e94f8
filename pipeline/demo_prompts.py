"""The demo's prompts, of our own making: `python -m pipeline.demo_prompts jobs/prompts` writes both files again.

Four domains: arithmetic word problems, short code, chat (partly two turns) and instruction following. Training and
evaluation prompts are drawn from the same families without sharing a single prompt, so that the evaluation is held
out in text but not in kind. Deterministic: a test compares the committed files with this generator.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

TRAIN_PER_DOMAIN = 80
EVAL_PER_DOMAIN = 12
_SEED = 20260705

_NAMES = ["Mia", "Omar", "Lena", "Kofi", "Priya", "Tomas", "Aiko", "Bruno", "Sara", "Yusuf", "Ines", "Pavel"]
_GOODS = ["pencils", "apples", "stickers", "marbles", "books", "cookies", "tickets", "seeds", "stamps", "shells"]
_PLACES = ["a shop", "a market", "a school fair", "a library", "a farm", "a bakery"]
_WORD_PROBLEMS = [
    "{name} buys {a} boxes of {goods} at {place}. Each box holds {b} {goods}. How many {goods} are there in total?",
    "{name} has {c} {goods} and gives away {a}. Then {name} finds {b} more. How many {goods} does {name} have now?",
    "At {place}, one bag of {goods} costs {a} dollars. {name} buys {b} bags and pays with a {d} dollar note. "
    "How much change does {name} get?",
    "{name} shares {e} {goods} equally among {b} friends. How many {goods} does each friend get?",
    "A train travels {f} kilometres every hour. How far does it travel in {b} hours?",
    "{name} reads {a} pages on each of {b} days and then {c} pages on Sunday. How many pages is that?",
]
_CODE_TASKS = [
    "returns the sum of all {kind} numbers in a list",
    "returns the largest {kind} number in a list, or None when there is none",
    "counts how many {kind} numbers a list holds",
    "removes every {kind} number from a list",
    "checks whether all numbers of a list are {kind}",
    "returns the {kind} numbers of a list in reverse order",
    "returns the index of the first {kind} number in a list",
    "squares each {kind} number in a list and keeps the others as they are",
]
_CODE_KINDS = ["even", "odd", "positive", "negative", "prime", "two-digit", "repeated", "non-zero"]
_CODE_STYLES = [
    "Write a Python function that {task}.",
    "In Python, write a short function which {task}. Add an example.",
]
_TOPICS = [
    "the seasons", "the Moon", "rainbows", "honey bees", "volcanoes", "the water cycle", "magnets", "whales", "bread",
    "bicycles", "the human heart", "trees in winter", "tides", "clouds", "recycling", "the Sahara", "penguins",
    "earthquakes", "chess", "photosynthesis", "glaciers", "batteries", "spiders", "the Silk Road", "lightning",
]  # fmt: skip
_QUESTIONS = [
    "Can you explain {topic} to a ten-year-old?",
    "What are three interesting facts about {topic}?",
    "Why do people find {topic} interesting?",
    "I have to give a short talk about {topic}. Where should I start?",
    "What is a common mistake people make about {topic}?",
]
_FOLLOW_UPS = [
    "Thanks. Can you say that in one sentence?",
    "Can you give me one more example?",
    "Which part is the most important one, and why?",
]
_FORMS = [
    "List exactly five words that are related to {topic}, one on each line.",
    "Write a title and two sentences about {topic}.",
    "Write three bullet points about {topic}. Start each of them with a verb.",
    "Give a definition of {topic} in at most twenty words.",
    "Write a short poem of four lines about {topic}.",
    "Write a polite e-mail that asks a teacher for help with {topic}.",
    "Name one advantage and one disadvantage of {topic}, on two lines.",
    "Write two quiz questions about {topic}, each with its answer.",
]

Messages = list[dict[str, str]]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _math(rng: random.Random) -> Messages:
    a, b = rng.randint(2, 9), rng.randint(3, 9)
    text = rng.choice(_WORD_PROBLEMS).format(
        name=rng.choice(_NAMES),
        goods=rng.choice(_GOODS),
        place=rng.choice(_PLACES),
        a=a,
        b=b,
        c=rng.randint(10, 60),
        d=100,
        e=b * rng.randint(3, 12),
        f=rng.randint(40, 120),
    )
    return [_user(text)]


def _code(rng: random.Random) -> Messages:
    task = rng.choice(_CODE_TASKS).format(kind=rng.choice(_CODE_KINDS))
    return [_user(rng.choice(_CODE_STYLES).format(task=task))]


def _chat(rng: random.Random) -> Messages:
    messages = [_user(rng.choice(_QUESTIONS).format(topic=rng.choice(_TOPICS)))]
    if rng.random() < 0.25:
        # The empty assistant turn only marks where the regenerated answer goes.
        messages += [{"role": "assistant", "content": "-"}, _user(rng.choice(_FOLLOW_UPS))]
    return messages


def _instruct(rng: random.Random) -> Messages:
    return [_user(rng.choice(_FORMS).format(topic=rng.choice(_TOPICS)))]


_DOMAINS: dict[str, Callable[[random.Random], Messages]] = {
    "math": _math,
    "code": _code,
    "chat": _chat,
    "instruct": _instruct,
}


def demo_prompts() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return (training rows, evaluation rows): dicts of id, domain and messages, without a common prompt."""
    train: list[dict[str, object]] = []
    evaluation: list[dict[str, object]] = []
    for domain, draw in _DOMAINS.items():
        distinct = _distinct(draw, random.Random(f"{_SEED}-{domain}"))
        for split, count, rows in (("eval", EVAL_PER_DOMAIN, evaluation), ("train", TRAIN_PER_DOMAIN, train)):
            for number in range(count):
                rows.append({"id": f"{domain}-{split}-{number:03d}", "domain": domain, "messages": next(distinct)})
    return train, evaluation


def _distinct(draw: Callable[[random.Random], Messages], rng: random.Random) -> Iterator[Messages]:
    seen: set[str] = set()
    while True:
        messages = draw(rng)
        first = messages[0]["content"]
        if first not in seen:
            seen.add(first)
            yield messages


def write_demo_prompts(directory: Path) -> None:
    """Write demo_train.jsonl and demo_eval.jsonl to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("demo_train", "demo_eval"), demo_prompts(), strict=True):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_demo_prompts(Path(sys.argv[1]))
