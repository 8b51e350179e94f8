"""The prompts of an evaluation: which are taken, in what order they are decoded, and which were trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cache_store.ledger import Reject
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.eval_actor import NO_DOMAIN, EvalTask
from pipeline.prompts import Prompt, PromptCounts, read_prompts

# A chunk is what an actor is handed at a time: several batches, so that waiting requests keep its places full.
_BATCHES_PER_CHUNK = 4


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The prompts to measure on, and how many rows of the sources were rejected."""

    prompts: tuple[Prompt, ...]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leak:
    """Evaluation prompts that are training prompts too."""

    compared: int
    """Rows of the training sources that were read; 0 when they could not be."""
    prompt_ids: tuple[str, ...]
    problem: str | None = None
    """Why nothing was compared."""


def read_held_out(config: Config) -> HeldOut:
    """The first `limit_per_domain` usable prompts of each domain, in the order of the files.

    Raises ConfigError for a missing file, and when no row can be used.
    """
    section = config.evaluation
    taken: dict[str, int] = {}
    prompts: list[Prompt] = []
    rejected: list[str] = []
    counts = PromptCounts()
    for item in read_prompts(section.prompts, endpoint_url=config.cache.endpoint_url, counts=counts):
        if isinstance(item, Reject):
            rejected.append(f"{item.source}: {item.reason}")
            continue
        domain = item.domain or NO_DOMAIN
        if section.limit_per_domain is None or taken.get(domain, 0) < section.limit_per_domain:
            taken[domain] = taken.get(domain, 0) + 1
            prompts.append(item)
    if not prompts:
        raise ConfigError(
            f"evaluation.prompts {list(section.prompts)}: no usable prompt in {counts.rows} rows"
            + (f"; the first: {rejected[0]}" if rejected else "")
        )
    return HeldOut(tuple(prompts), tuple(rejected))


def find_leak(config: Config, prompts: Sequence[Prompt]) -> Leak:
    """Which prompts open with a question that a training prompt opens with, too, letter case and spacing aside.

    Training sources that cannot be read any more make no evaluation impossible: the Leak says so.
    """
    mine = {_question(prompt): prompt.sample_id for prompt in prompts}
    found: set[str] = set()
    counts = PromptCounts()
    try:
        for item in read_prompts(
            config.prompts.sources,
            limit=config.prompts.limit,
            endpoint_url=config.cache.endpoint_url,
            counts=counts,
        ):
            if isinstance(item, Prompt) and (question := _question(item)) in mine:
                found.add(mine[question])
    except (ConfigError, OSError) as error:
        return Leak(0, (), str(error))
    return Leak(counts.rows, tuple(prompt.sample_id for prompt in prompts if prompt.sample_id in found))


def _question(prompt: Prompt) -> str:
    return " ".join(prompt.users[0].casefold().split())


def make_tasks(
    prompts: Iterable[Prompt], temperatures: Sequence[float], baseline_prompts_per_domain: int | None
) -> Iterator[EvalTask]:
    """One task per prompt and temperature; the baselines decode the first prompts of each domain."""
    seen: dict[str, int] = {}
    for prompt in prompts:
        domain = prompt.domain or NO_DOMAIN
        seen[domain] = seen.get(domain, 0) + 1
        with_baselines = baseline_prompts_per_domain is None or seen[domain] <= baseline_prompts_per_domain
        for temperature in temperatures:
            yield EvalTask(prompt, temperature, with_baselines)


def make_chunks(tasks: Sequence[EvalTask], *, num_actors: int, batch_size: int) -> list[list[EvalTask]]:
    """Tasks of one temperature each, in pieces that occupy every actor and bound what one of them holds."""
    chunks = []
    for temperature in dict.fromkeys(task.temperature for task in tasks):
        same = [task for task in tasks if task.temperature == temperature]
        size = min(-(-len(same) // num_actors), _BATCHES_PER_CHUNK * batch_size)
        chunks += [same[start : start + size] for start in range(0, len(same), size)]
    return chunks
