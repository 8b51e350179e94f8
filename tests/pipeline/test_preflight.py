"""The checks before the fleet, each broken on purpose. The path through real Ray is in test_build.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_store.codec import to_bits, to_float
from cache_store.errors import CacheMismatch
from cache_store.schema import CacheSpec, TargetSample
from cache_store.storage import Storage, open_storage
from cache_store.writer import CacheWriter
from pipeline.build import prepare
from pipeline.config import Config
from pipeline.engines.hf import HiddenStateExtractor, LayerTap, SequenceStates, bf16_bits, load_target
from pipeline.errors import ConfigError, PreflightFailed
from pipeline.identity import check_target, make_spec
from pipeline.preflight import check_round_trip, check_space, check_states, expected_lengths, rendered_prompts
from pipeline.prompt_store import spool_prompts
from pipeline.prompts import Prompt
from tests.pipeline.fake_engine import greedy
from tests.pipeline.hf_target import FAMILIES, LAYERS, save_tiny_target

PROMPTS = ([5, 6, 7, 8], [100, 101])
Answers = list[tuple[list[int], int]]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> tuple[torch.nn.Module, Answers, list[SequenceStates]]:
    from pipeline.config import TargetSection

    model = load_target(TargetSection(path=str(tiny_target), dtype="float32"), "cpu")
    answers = [([*prompt, *greedy(model, prompt, 12)], len(prompt)) for prompt in PROMPTS]
    extractor = HiddenStateExtractor(model, [0, 2], tokens_per_batch=64)
    states = sorted(extractor.extract([ids for ids, _ in answers]), key=lambda item: item.index)
    return model, answers, states


@pytest.fixture
def spec(make_config: Callable[..., Config]) -> CacheSpec:
    config = make_config()
    return make_spec(config, check_target(config), "0" * 64)


def test_the_right_states_pass(target: Any, spec: CacheSpec, tiny_target: Path) -> None:
    model, answers, states = target
    report = check_states(model, tiny_target, states, answers, 0.98)
    assert report.agreement >= 0.98
    assert report.agreement_unnormed < 0.5  # what the check would see without the final norm
    assert report.norm_error < 0.01
    check_round_trip(spec, states, answers)


@pytest.mark.parametrize("codec", ["raw", "i8cr", "f8r"])
@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_the_round_trip_knows_what_a_codec_promises(
    target: Any, spec: CacheSpec, codec: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answers, states = target
    chosen = replace(spec, codec=codec, format=form)
    check_round_trip(chosen, states, answers)
    monkeypatch.setattr(CacheWriter, "write", lambda self, sample: write(self, _doubled(sample)))
    with pytest.raises(PreflightFailed, match=r"does not give back|promises"):
        check_round_trip(chosen, states, answers)


write = CacheWriter.write


def _doubled(sample: TargetSample) -> TargetSample:
    """A writer that stores other states than it was given."""
    return replace(sample, hidden_states=to_bits(2 * to_float(sample.hidden_states)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_and_fails_without_its_norm(family: str, tmp_path: Path) -> None:
    from pipeline.config import TargetSection

    folder = save_tiny_target(tmp_path, family=family)
    model: Any = load_target(TargetSection(path=str(folder), dtype="float32"), "cpu")
    answers = [([*PROMPTS[0], *greedy(model, PROMPTS[0], 12)], 4)]
    states = list(HiddenStateExtractor(model, [-1, 2], tokens_per_batch=64).extract([answers[0][0]]))
    report = check_states(model, folder, states, answers, 0.98)
    assert report.norm_error < 0.01
    tap = LayerTap(model.get_decoder(), [LAYERS - 1])
    model(torch.tensor([answers[0][0]]))
    raw = [replace(states[0], last_hidden_state=bf16_bits(tap.take()[0][0]).numpy())]
    with pytest.raises(PreflightFailed, match="not the one after the final norm"):
        check_states(model, folder, raw, answers, 0.98)


def test_states_from_before_the_norm_fail(target: Any, tiny_target: Path) -> None:
    model, answers, states = target
    raw = []
    for item, (ids, _) in zip(states, answers, strict=True):
        captured: list[torch.Tensor] = []
        handle = model.model.layers[-1].register_forward_hook(lambda m, a, out: captured.append(out))  # noqa: B023
        model(torch.tensor([ids]))
        handle.remove()
        raw.append(replace(item, last_hidden_state=bf16_bits(captured[0][0]).numpy()))
    with pytest.raises(PreflightFailed, match="not the one after the final norm"):
        check_states(model, tiny_target, raw, answers, 0.98)


def test_an_embedding_that_is_scaled_in_a_way_nobody_knows_fails(
    target: Any, tiny_target: Path, tmp_path: Path
) -> None:
    model, answers, states = target
    other = save_tiny_target(tmp_path, family="qwen3", seed=1)  # stands for a family whose facts are wrong here
    with pytest.raises(PreflightFailed, match="not what enters the target's first layer"):
        check_states(model, other, states, answers, 0.98)
    check_states(model, tiny_target, states, answers, 0.98)


def test_tokens_of_another_model_fail(target: Any, tiny_target: Path) -> None:
    model, answers, _ = target
    other = [([*ids[:start], *[(token + 1) % 1000 for token in ids[start:]]], start) for ids, start in answers]
    extractor = HiddenStateExtractor(model, [0, 2], tokens_per_batch=64)
    states = sorted(extractor.extract([ids for ids, _ in other]), key=lambda item: item.index)
    with pytest.raises(PreflightFailed, match="greedy tokens of the engine, wanted 98%"):
        check_states(model, tiny_target, states, other, 0.98)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("hidden_states", lambda value: value[:1], r"hidden_states is uint16 \[1,"),
        ("hidden_states", lambda value: value[:, :, :-1], r"hidden_states is uint16 \[2, \d+, 31\]"),
        ("hidden_states", lambda value: value[:, :-1], "hidden_states is uint16"),
        ("last_hidden_state", lambda value: value.astype(np.float32), "last_hidden_state is float32"),
        ("last_hidden_state", lambda value: np.full_like(value, 0x7FC0), "infinite or NaN"),
    ],
    ids=["a layer fewer", "wrong width", "a row fewer", "wrong dtype", "NaN"],
)
def test_broken_states_never_pass(
    target: Any, spec: CacheSpec, field: str, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    _, answers, states = target
    broken = replace(states[0], **{field: change(getattr(states[0], field))})
    with pytest.raises(PreflightFailed, match=message):
        check_round_trip(spec, [broken, *states[1:]], answers)


def test_space_is_checked_against_the_estimate(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config([{"prompt": f"question {n}"} for n in range(50)])
    target, storage = check_target(config), open_storage(config.cache.url)
    spooled = spool_prompts(config, tmp_path, keep_first=1)
    spec = make_spec(config, target, spooled.digest)
    expected = expected_lengths(config, target.chat, spooled)
    needed = check_space(config, storage, spec, 50, expected)
    assert needed > 50 * 8 * spec.hidden_size * 2  # at least the answers' last hidden states
    monkeypatch.setattr(Storage, "free_bytes", lambda self: needed - 1)
    with pytest.raises(PreflightFailed, match=r"B free or its own, up to .*B needed for 50 prompts"):
        check_space(config, storage, spec, 50, expected)
    storage.put("shards/one.parquet", b"x")  # a build under way has part of the space already
    assert check_space(config, storage, spec, 50, expected) == needed
    forced = make_config(cache={"ignore_free_space": True})
    assert check_space(forced, storage, spec, 50, expected) == needed


def test_prompts_that_cannot_be_rendered(make_config: Callable[..., Config]) -> None:
    chat = check_target(make_config()).chat
    prompt = Prompt(sample_id="a", system=None, users=("hi",), domain=None, source="f:1")
    assert "hi" in rendered_prompts(chat, [prompt])[0]
    chat.tokenizer.chat_template, kept = "{{ raise_exception('never') }}", chat.tokenizer.chat_template
    try:
        with pytest.raises(PreflightFailed, match="none of the first 1 prompts can be rendered"):
            rendered_prompts(chat, [prompt])
    finally:
        chat.tokenizer.chat_template = kept


def test_a_dry_run_writes_nothing(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config([{"prompt": "hi"}])
    assert prepare(config, dry_run=True) is None
    assert not (tmp_path / "cache").exists()


def test_rows_longer_than_the_target_reads_are_refused(make_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 512"):
        prepare(make_config([{"prompt": "hi"}], max_length=513), dry_run=True)


def test_a_dry_run_refuses_what_the_build_would_refuse(make_config: Callable[..., Config]) -> None:
    rows = [{"prompt": "hi"}]
    first = make_config(rows)
    assert prepare(first) is not None
    assert prepare(first, dry_run=True) is None
    with pytest.raises(CacheMismatch, match=r"identity.seed: cache has 42, this run wants 1"):
        prepare(make_config(rows, generation={"sampling": {"max_new_tokens": 8, "seed": 1}}), dry_run=True)
