"""Checks before the fleet starts: storage, space, and a few prompts through the whole path, engine to reader.

The cheap checks on the target are in identity.check_target. What the engine part proved is kept in
`<cache>/preflight.json` under the cache's fingerprint, so a resumed build does not repeat it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cache_store.calibration import calibrate, commit_calibration
from cache_store.codec import to_float
from cache_store.errors import CacheError
from cache_store.estimate import estimate_bytes, size_text
from cache_store.identity import fingerprint
from cache_store.manifest import SHARDS
from cache_store.reader import CacheReader
from cache_store.row_codec import MAX_ROW_ERROR
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter, create_cache
from pipeline.chat import Chat, RenderError
from pipeline.cluster import has_accelerators, session_logs, watch
from pipeline.config import Config, PlanSection, TargetSection
from pipeline.engines import hf
from pipeline.errors import PreflightFailed
from pipeline.extract import to_sample
from pipeline.identity import CheckedTarget
from pipeline.prompt_store import SpooledPrompts, iterate_spooled
from pipeline.prompts import Prompt
from pipeline.regenerate import Engine
from pipeline.turns import REQUEST_SCHEMA, to_answers
from pipeline.work import one_line

if TYPE_CHECKING:
    import torch

RECORD = "preflight.json"
PROBE_PROMPTS = 3
PROBE_TOKENS = 64
# Share of greedy tokens that argmax(lm_head(last hidden)) must give again. Two bf16 engines disagree at near ties
# (measured: 501 of 512 agree on the demo target); a state from the wrong side of the norm agrees far less.
MIN_AGREEMENT = {"bfloat16": 0.9, "float32": 0.98}
# Largest relative distance between the extracted last hidden state and norm(output of the last layer), computed in
# another batch: bf16 noise is below 0.02, the un-normed state is several times itself away.
MAX_NORM_ERROR = 0.1
_SAMPLED_PROMPTS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PathReport:
    """What the one-prompt path proved."""

    prompts: int
    tokens: int
    supervised: int
    agreement: float
    """argmax(lm_head(last hidden)) equals the engine's greedy token, share of supervised tokens."""
    agreement_unnormed: float
    """The same without the final norm: what a wrong tensor would give."""
    norm_error: float


def check_space(config: Config, storage: Storage, spec: CacheSpec, count: int, expected: PlanSection) -> int:
    """Bytes that the cache of `count` prompts will take at most, by `expected_lengths`.

    Raises PreflightFailed when fewer are free or already taken by its shards, unless `cache.ignore_free_space`.
    """
    answer = expected.response_tokens or 0.0
    per_sample = min(expected.prompt_tokens + answer, float(config.max_length))
    estimate = estimate_bytes(spec, round(per_sample * count), min(1.0, answer / per_sample), samples=count)
    free = storage.free_bytes()
    if free is None or config.cache.ignore_free_space:
        return estimate.stored_bytes
    free += sum(info.size for info in storage.list(SHARDS))
    if estimate.stored_bytes > free:
        raise PreflightFailed(
            f"cache.url {config.cache.url}: {size_text(free)} free or its own, up to "
            f"{size_text(estimate.stored_bytes)} needed for {count:,} prompts; "
            "free some, choose another place, or set cache.ignore_free_space=true"
        )
    return estimate.stored_bytes


def expected_lengths(config: Config, chat: Chat, spooled: SpooledPrompts) -> PlanSection:
    """The plan section with the own lengths of the prompts (an evenly spaced sample) and answers at their limit."""
    prompt_tokens, turns = _prompt_tokens(chat, spooled)
    answer = config.generation.sampling.max_new_tokens * turns
    return config.plan.model_copy(update={"prompt_tokens": prompt_tokens, "response_tokens": answer})


def _prompt_tokens(chat: Chat, spooled: SpooledPrompts) -> tuple[float, float]:
    """Mean prompt tokens and mean turns."""
    step = max(1, spooled.counts.accepted // _SAMPLED_PROMPTS)
    lengths, turns = [], []
    for number, (system, users) in enumerate(iterate_spooled(spooled)):
        if number % step:
            continue
        turns.append(len(users))
        try:
            lengths.append(sum(len(chat.prompt_ids(system, [user], [])) for user in users))
        except RenderError:
            continue  # such rows are rejected, with the reason, when their turn comes
    return (float(np.mean(lengths)) if lengths else 0.0), float(np.mean(turns))


def rendered_prompts(chat: Chat, prompts: Sequence[Prompt]) -> list[str]:
    """The first turn of each prompt as the target sees it. Raises PreflightFailed when none can be rendered."""
    texts, problems = [], []
    for prompt in prompts:
        try:
            texts.append(chat.text(prompt.system, prompt.users[:1], []))
        except RenderError as error:
            problems.append(str(error))
    if not texts:
        raise PreflightFailed(f"none of the first {len(prompts)} prompts can be rendered; {problems[0]}")
    return texts


def passed_before(storage: Storage, spec: CacheSpec) -> bool:
    """Whether the engine part already passed for exactly these settings."""
    return storage.exists(RECORD) and json.loads(storage.read(RECORD)).get("fingerprint") == fingerprint(spec)


def check_path(
    config: Config,
    storage: Storage,
    spec: CacheSpec,
    target: CheckedTarget,
    texts: Sequence[str],
    engine: Callable[[], Engine],
) -> PathReport:
    """A few prompts through everything: greedy engine tokens, extraction, norm check, shard, reader; then recorded.

    Raises PreflightFailed saying which link does not hold.
    """
    import ray

    prompts = [ids for text in texts if len(ids := target.chat.encode(text)) + 2 <= config.max_length]
    if not prompts:
        raise PreflightFailed(f"none of the first prompts fits into max_length {config.max_length}")
    answers = _greedy_answers(config, prompts, engine())
    gpus = config.extraction.gpus_per_actor if has_accelerators() else 0
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(probe)
    try:
        report: PathReport = ray.get(task.remote(target.section, spec, answers))
    except ray.exceptions.RayTaskError as error:
        raise PreflightFailed(one_line(error)) from error
    record = {"fingerprint": fingerprint(spec), **asdict(report)}
    storage.put(RECORD, (json.dumps(record, indent=1) + "\n").encode("utf-8"))
    return report


def _greedy_answers(config: Config, prompts: Sequence[Sequence[int]], engine: Engine) -> list[tuple[list[int], int]]:
    """(prompt + greedy tokens, prompt length) of each prompt."""
    import pyarrow as pa
    import ray

    rows = [
        {
            "sample_id": str(number),
            "turn": 0,
            "tokenized_prompt": list(ids),
            "max_tokens": min(PROBE_TOKENS, config.max_length - len(ids)),
            "seed": 0,
            "carry": "{}",
        }
        for number, ids in enumerate(prompts)
    ]
    requests = ray.data.from_arrow(pa.Table.from_pylist(rows, schema=REQUEST_SCHEMA))
    dataset = engine(requests).map_batches(to_answers, batch_size=None, batch_format="pyarrow")
    found: dict[int, list[int]] = {}
    try:
        for row in watch(dataset, stage="preflight", stall_timeout_s=config.generation.stall_timeout_s):
            if row is not None:
                _check_answer(row, prompts[int(row["sample_id"])])
                found[int(row["sample_id"])] = list(row["generated_tokens"])
    except ray.exceptions.RayError as error:
        raise PreflightFailed(f"the engine does not start or run: {one_line(error)}; logs: {session_logs()}") from error
    return [([*prompts[number], *found[number]], len(prompts[number])) for number in sorted(found)]


def _check_answer(row: dict[str, Any], prompt: Sequence[int]) -> None:
    if row["__inference_error__"]:
        raise PreflightFailed(f"the engine refused a prompt: {row['__inference_error__']}")
    if list(row["prompt_token_ids"]) != list(prompt):
        raise PreflightFailed(
            f"the engine saw {len(row['prompt_token_ids'])} prompt tokens that are not the {len(prompt)} it was given"
        )
    if not len(row["generated_tokens"]):
        raise PreflightFailed("the engine generated no token")


# --- in a worker -----------------------------------------------------------------------------------------------------


def probe(section: TargetSection, spec: CacheSpec, answers: Sequence[tuple[list[int], int]]) -> PathReport:
    """Extract the answers, check the norm and the greedy tokens, write and read them back as a cache of their own."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hf.load_target(section, device)
    extractor = hf.HiddenStateExtractor(model, spec.layer_ids, tokens_per_batch=4096)
    states = sorted(extractor.extract([ids for ids, _ in answers]), key=lambda item: item.index)
    report = check_states(model, hf.resolve_target(section), states, answers, MIN_AGREEMENT[section.dtype])
    check_round_trip(spec, states, answers)
    return report


def check_states(
    model: torch.nn.Module,
    folder: Path,
    states: Sequence[hf.SequenceStates],
    answers: Sequence[tuple[list[int], int]],
    min_agreement: float,
) -> PathReport:
    """Compare the states with the greedy tokens and with the final norm, by the embedding, norm and head that training
    will read from the target's files. Raises PreflightFailed.
    """
    import torch

    from model.target_heads import load_final_norm, load_target_heads

    parameter = next(model.parameters())
    heads = load_target_heads(folder, dtype=parameter.dtype, device=parameter.device)
    norm = load_final_norm(folder, dtype=parameter.dtype).to(parameter.device)
    hits = raw_hits = total = 0
    norm_error = 0.0
    for item, (ids, prompt_length) in zip(states, answers, strict=True):
        last_TD = torch.from_numpy(item.last_hidden_state).view(torch.bfloat16).to(parameter)
        embedded_TD, raw_TD = _ends_of_the_decoder(model, ids)
        if not torch.equal(heads.embed(torch.tensor(ids, device=parameter.device)), embedded_TD):
            raise PreflightFailed(
                f"{folder}: the embeddings read from its files are not what enters the target's first layer: its "
                "family scales or normalises them in a way that is not known here"
            )
        normed_TD = norm(raw_TD)
        norm_error = max(norm_error, float((last_TD - normed_TD).float().norm() / normed_TD.float().norm()))
        labels = torch.tensor(ids[prompt_length:], device=parameter.device)
        rows = slice(prompt_length - 1, len(ids) - 1)
        with torch.inference_mode():
            hits += int((heads.logits(last_TD[rows]).argmax(-1) == labels).sum())
            raw_hits += int((heads.logits(raw_TD[rows]).argmax(-1) == labels).sum())
        total += len(labels)
    if norm_error > MAX_NORM_ERROR:
        raise PreflightFailed(
            f"the last hidden state is not the one after the final norm: relative distance {norm_error:.3f}, "
            f"wanted at most {MAX_NORM_ERROR}"
        )
    if hits < min_agreement * total:
        raise PreflightFailed(
            f"argmax of lm_head(last hidden state) gives {hits} of {total} greedy tokens of the engine, wanted "
            f"{min_agreement:.0%}: engine and transformers do not run the same model, or the norm is wrong"
        )
    return PathReport(
        prompts=len(answers),
        tokens=sum(len(ids) for ids, _ in answers),
        supervised=total,
        agreement=hits / total,
        agreement_unnormed=raw_hits / total,
        norm_error=norm_error,
    )


def _ends_of_the_decoder(model: torch.nn.Module, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[T,D] each: what enters the first decoder layer, and the last one's output before the final norm."""
    import torch

    decoder = model.get_decoder()  # type: ignore[operator]
    tap = hf.LayerTap(decoder, [-1, len(decoder.layers) - 1])
    try:
        with torch.inference_mode():
            decoder(input_ids=torch.tensor([list(ids)], device=next(model.parameters()).device), use_cache=False)
        first, last = tap.take()
        return first[0], last[0]
    finally:
        tap.close()


def check_round_trip(
    spec: CacheSpec, states: Sequence[hf.SequenceStates], answers: Sequence[tuple[list[int], int]]
) -> None:
    """Write the samples to a cache in a temporary folder and read them back: shapes, dtypes, values, mask.

    Raises PreflightFailed.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        storage = open_storage(str(Path(folder)))
        try:
            create_cache(storage, spec)
            samples = [_sample(item, *answer) for item, answer in zip(states, answers, strict=True)]
            if spec.calibrated:
                commit_calibration(storage, spec, calibrate(spec, samples))
            with CacheWriter(storage, spec) as writer:
                for written in samples:
                    writer.write(written)
            reader = CacheReader(storage, allow_unsealed=True)
            for item, (ids, prompt_length) in zip(states, answers, strict=True):
                sample = reader.read_id(str(item.index))
                supervised = np.flatnonzero(sample.loss_mask)
                if list(sample.input_ids) != list(ids) or list(supervised) != list(range(prompt_length, len(ids))):
                    raise PreflightFailed("the cache does not give back the tokens and exactly the generated ones")
                _check_states(spec, sample.hidden_states, item.hidden_states)
        except CacheError as error:
            raise PreflightFailed(f"a probe sample cannot be stored: {error}") from error


def _sample(item: hf.SequenceStates, ids: Sequence[int], prompt_length: int) -> TargetSample:
    spans = [(prompt_length, len(ids))]
    return to_sample({"sample_id": str(item.index), "token_ids": ids, "spans": spans, "metadata": "{}"}, item)


def _check_states(spec: CacheSpec, found: np.ndarray, wanted: np.ndarray) -> None:
    """The captured layers as they went in, up to their codec's bound. Raises PreflightFailed."""
    bound = MAX_ROW_ERROR.get(spec.codec)
    if bound is None:
        if not np.array_equal(found, wanted):
            raise PreflightFailed("the cache does not give back the hidden states bit for bit")
        return
    before, after = to_float(wanted).astype(np.float64), to_float(found).astype(np.float64)
    size = np.maximum(np.linalg.norm(before, axis=-1), np.finfo(np.float64).tiny)
    if (error := float((np.linalg.norm(after - before, axis=-1) / size).max())) > bound * 1.0001:
        raise PreflightFailed(
            f"the cache gives back a row of hidden states with an error of {error:.3%}, codec {spec.codec} promises "
            f"{bound:.1%}"
        )
