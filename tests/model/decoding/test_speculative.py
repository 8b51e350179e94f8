"""The draft-verify loop against the golden runs, and its losslessness."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.decoding.drafting import BlockDrafter, Drafter, Proposal
from model.decoding.sampling import Sampling, warp
from model.decoding.speculative import (
    BatchDecoder,
    DecodeConfig,
    DecodeResult,
    Request,
    Round,
    decode_all,
    speculative_decode,
    target_decode,
)
from model.drafter import DSparkDrafter
from model.errors import CalibrationError, DecodingError
from model.target_heads import TargetHeads
from pipeline.engines.hf_verifier import HfVerifier
from tests.golden_data import drafter_config, read_json, split_state, tensors, tiny_heads
from tests.tiny_target import TableVerifier, tiny_verifier

# 99.9 % quantiles by degrees of freedom.
CHI_SQUARE_999 = dict(enumerate((10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59), start=1))
CHI_SQUARE_999 |= dict(enumerate((31.26, 32.91, 34.53, 36.12, 37.70, 39.25, 40.79, 42.31, 43.82, 45.31), start=11))
GOLDEN_DECODE = read_json("decode/decode.json")
RUNS = {run["name"]: run for run in GOLDEN_DECODE["runs"]}


@pytest.fixture(scope="module")
def verifier() -> HfVerifier:
    return tiny_verifier()


def load_run(run: dict[str, Any]) -> tuple[DSparkDrafter, TargetHeads]:
    state = tensors(*run["state_files"])
    width = state["confidence_head.proj.weight"].shape[1] if "confidence_head.proj.weight" in state else 0
    config = drafter_config(
        block_size=run["block_size"],
        markov_head_type=run["markov_head_type"],
        markov_rank=0 if run["markov_head_type"] == "none" else 8,
        enable_confidence_head=width > 0,
        confidence_head_with_markov=width == 72,
    )
    return split_state(state, config)


def greedy(**overrides: Any) -> DecodeConfig:
    settings = {"max_new_tokens": 64, "temperature": 0.0, "stop_ids": frozenset(), "seed": 0}
    return DecodeConfig(**{**settings, **overrides})


def run_config(run: dict[str, Any]) -> DecodeConfig:
    return greedy(
        # The reference stops only when MORE than max_new_tokens exist, and cuts the output afterwards.
        max_new_tokens=run["max_new_tokens"] + 1,
        stop_ids=frozenset(run["stop_token_ids"] or ()),
        confidence_threshold=run["confidence_threshold"],
    )


def check_run(run: dict[str, Any], result: DecodeResult) -> None:
    prompt = GOLDEN_DECODE["prompts"][run["prompt"]]
    assert prompt + result.output_ids[: run["max_new_tokens"]] == run["output_ids"]
    assert [r.emitted for r in result.rounds] == run["acceptance_lengths"]
    assert [r.proposed for r in result.rounds] == run["proposal_lengths"]
    assert [r.accepted for r in result.rounds] == run["accepted_draft_lengths"]
    for ours, golden in zip(result.rounds, run["rounds"], strict=True):
        assert list(ours.draft_ids) == golden["draft_tokens"]
        if golden["confidence_logits"]:
            expected = torch.tensor(golden["confidence_logits"]).sigmoid().tolist()
            assert ours.confidences == pytest.approx(expected, abs=2e-5)
    assert result.accepted_length == pytest.approx(np.mean(run["acceptance_lengths"]))


@pytest.mark.parametrize("name", RUNS)
def test_golden_run(name: str, verifier: HfVerifier) -> None:
    run = RUNS[name]
    drafter, heads = load_run(run)
    prompt = GOLDEN_DECODE["prompts"][run["prompt"]]
    check_run(run, speculative_decode(verifier, drafter, heads, prompt, run_config(run)))


def test_golden_runs_hold_in_one_batch(verifier: HfVerifier) -> None:
    """Runs that share a drafter and its settings, decoded together: they join, differ in length and leave."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in RUNS.values():
        key = str(
            [run[k] for k in ("state_files", "block_size", "max_new_tokens", "stop_token_ids", "confidence_threshold")]
        )
        groups.setdefault(key, []).append(run)
    assert max(len(runs) for runs in groups.values()) >= 3
    for runs in groups.values():
        drafter, heads = load_run(runs[0])
        config = run_config(runs[0])
        decoder = BatchDecoder(verifier, BlockDrafter(drafter, heads), config, batch_size=2)
        results = decode_all(decoder, [Request(GOLDEN_DECODE["prompts"][run["prompt"]]) for run in runs])
        for run, result in zip(runs, results, strict=True):
            check_run(run, result)


def test_raw_rounds_are_golden(verifier: HfVerifier) -> None:
    raw = tensors("decode/raw_rounds")
    for name in {key.split(".round")[0] for key in raw}:
        run = RUNS[name]
        drafter, heads = load_run(run)
        prompt = GOLDEN_DECODE["prompts"][run["prompt"]]
        with torch.no_grad():
            verifier.keep([])
            block = BlockDrafter(drafter, heads)
            block.add(verifier.add([prompt]).hidden, [prompt])
            hidden = block.block_states([run["rounds"][0]["anchor_token"]])
        assert torch.allclose(hidden[0], raw[f"{name}.round0.block_hidden"], atol=2e-5)
        assert torch.allclose(heads.logits(hidden[0]), raw[f"{name}.round0.base_logits"], atol=2e-5)
        previous = torch.tensor([run["rounds"][0]["anchor_token"], *run["rounds"][0]["draft_tokens"][:-1]])
        features = drafter.head_outputs(hidden, previous[None]).features_AKR
        logits = drafter.draft_logits(hidden, features, heads)[0]
        assert torch.allclose(logits, raw[f"{name}.round0.draft_logits"], atol=2e-5)


PROMPTS = 50
FITTED = next(run for run in RUNS.values() if run["drafter"] == "fitted" and run["markov_head_type"] == "vanilla")


class Adversary:
    """A drafter that proposes what it has been told the target will NOT say (or, every other block, noise)."""

    block_size, captured_width, has_confidence = 5, 192, False

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers, self._prompts, self._lengths = answers, list[int](), list[int]()

    def add(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        self._prompts += [hash(tuple(ids)) for ids in token_ids]
        self._lengths += [0 for _ in token_ids]

    def commit(self, hidden_BnC: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        self._lengths = [n + len(ids) for n, ids in zip(self._lengths, token_ids, strict=True)]

    def propose(self, anchor_ids: Sequence[int], sampling: Sampling, uniforms_BK: Tensor) -> Proposal:
        drafts = []
        for prompt, length in zip(self._prompts, self._lengths, strict=True):
            coming = [*self._answers[prompt][length + 1 :], *range(self.block_size)][: self.block_size]
            wrong = length % self.block_size  # right up to here, then wrong
            drafts.append([t if k < wrong else (t + 1) % 199 for k, t in enumerate(coming)])
        return Proposal(torch.tensor(drafts), None, None)

    def keep(self, rows: Sequence[int]) -> None:
        self._prompts = [self._prompts[row] for row in rows]
        self._lengths = [self._lengths[row] for row in rows]


@pytest.fixture(scope="module")
def fifty(verifier: HfVerifier) -> tuple[DecodeConfig, list[Request], list[list[int]]]:
    """Prompts of different lengths, and the target's own greedy answers, one prompt at a time."""
    rng = np.random.default_rng(1)
    requests = [Request(rng.integers(0, 199, size=rng.integers(1, 24)).tolist()) for _ in range(PROMPTS)]
    config = greedy(max_new_tokens=8, stop_ids=frozenset({7, 11}))
    results = decode_all(BatchDecoder(verifier, None, config, batch_size=1), requests)
    return config, requests, [result.output_ids for result in results]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("kind", ["trained", "random", "adversarial"])
def test_greedy_output_is_the_targets_own_on_fifty_prompts(
    kind: str,
    batch_size: int,
    verifier: HfVerifier,
    fifty: tuple[DecodeConfig, list[Request], list[list[int]]],
) -> None:
    config, requests, answers = fifty
    drafters: dict[str, Callable[[], Drafter]] = {
        "trained": lambda: BlockDrafter(*load_run(FITTED)),
        "random": lambda: BlockDrafter(
            DSparkDrafter(drafter_config(sample_from_anchor=False)).init_weights(3), tiny_heads()
        ),
        "adversarial": lambda: Adversary(
            {hash(tuple(q.prompt_ids)): ids for q, ids in zip(requests, answers, strict=True)}
        ),
    }
    decoder = BatchDecoder(verifier, drafters[kind](), config, batch_size=batch_size)
    results = decode_all(decoder, requests)
    assert [r.output_ids for r in results] == answers
    accepted = {r.accepted for result in results for r in result.rounds}
    assert 0 in accepted
    assert kind == "random" or max(accepted) >= 2


def test_the_target_in_a_batch_is_the_target_alone(
    verifier: HfVerifier, fifty: tuple[DecodeConfig, list[Request], list[list[int]]]
) -> None:
    config, requests, answers = fifty
    results = decode_all(BatchDecoder(verifier, None, config, batch_size=8), requests)
    assert [r.output_ids for r in results] == answers
    assert all(r.rounds == [] and r.seconds.draft == 0 for r in results)


@pytest.mark.parametrize("markov_head_type", ["vanilla", "gated", "rnn", "none"])
def test_greedy_output_is_the_targets_own_for_every_layout(markov_head_type: str, verifier: HfVerifier) -> None:
    rng = np.random.default_rng(1)
    heads = tiny_heads()
    for index in range(4):
        sizes: dict[str, Any] = {"block_size": 1 + 2 * index, "sample_from_anchor": index % 3 != 0}
        if markov_head_type == "none":
            sizes |= {"markov_rank": 0, "confidence_head_with_markov": False}
        drafter = DSparkDrafter(drafter_config(markov_head_type=markov_head_type, **sizes)).init_weights(index)
        requests = [Request(rng.integers(0, 199, size=rng.integers(1, 20)).tolist()) for _ in range(4)]
        stop_ids = frozenset(rng.integers(0, 199, size=2).tolist())
        config = greedy(max_new_tokens=12, stop_ids=stop_ids, confidence_threshold=0.45 * (index % 2))
        expected = [target_decode(verifier, request.prompt_ids, config).output_ids for request in requests]
        decoder = BatchDecoder(verifier, BlockDrafter(drafter, heads), config, batch_size=3)
        assert [result.output_ids for result in decode_all(decoder, requests)] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_do_not_depend_on_the_batch(temperature: float, verifier: HfVerifier) -> None:
    drafter, heads = load_run(FITTED)
    rng = np.random.default_rng(2)
    requests = [Request(rng.integers(0, 199, size=n).tolist(), seed=n) for n in (3, 17, 1, 9, 30, 4, 12)]
    config = greedy(max_new_tokens=24, temperature=temperature, top_p=0.9, top_k=50)

    def rounds(batch_size: int) -> list[list[tuple[int, ...]]]:
        decoder = BatchDecoder(verifier, BlockDrafter(drafter, heads), config, batch_size=batch_size)
        results = decode_all(decoder, requests)
        return [[(r.position, *r.draft_ids, r.accepted, r.emitted) for r in result.rounds] for result in results]

    assert rounds(1) == rounds(3) == rounds(8)


def toy(block_size: int, *, seed: int) -> tuple[TableVerifier, DSparkDrafter, TargetHeads]:
    """Five tokens; a drafter that is neither useless nor perfect, with confidences that vary."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(5, 5, generator=generator) * 1.2
    config = drafter_config(
        hidden_size=8, head_dim=4, vocab_size=5, mask_token_id=4, target_layer_ids=(1,), block_size=block_size
    )
    drafter = DSparkDrafter(config).init_weights(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(15.0 if parameter.dim() > 1 else 1.0)
    heads = TargetHeads.from_tensors(torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator))
    return TableVerifier(table, 8), drafter, heads


@pytest.mark.parametrize(
    ("threshold", "top_p", "top_k"), [(0.0, 1.0, -1), (0.5, 1.0, -1), (0.0, 0.8, -1), (0.0, 1.0, 3), (0.5, 0.9, 4)]
)
def test_sampled_output_has_the_targets_distribution(threshold: float, top_p: float, top_k: int) -> None:
    verifier, drafter, heads = toy(3, seed=7)
    config = DecodeConfig(
        max_new_tokens=100,
        temperature=1.0,
        top_p=top_p,
        top_k=top_k,
        stop_ids=frozenset(),
        seed=0,
        confidence_threshold=threshold,
    )
    requests = [Request([seed % 5], seed=seed) for seed in range(60)]
    results = decode_all(BatchDecoder(verifier, BlockDrafter(drafter, heads), config, batch_size=16), requests)
    transitions = np.zeros((5, 5))
    for request, result in zip(requests, results, strict=True):
        chain = [*request.prompt_ids, *result.output_ids]
        np.add.at(transitions, (chain[:-1], chain[1:]), 1)
    rounds = [r for result in results for r in result.rounds]
    accepted, proposed = sum(r.accepted for r in rounds), sum(r.proposed for r in rounds)
    assert 0.05 < accepted / proposed < 0.95, "the test must see accepted and rejected drafts"
    if threshold:
        assert proposed < 3 * len(rounds), "the threshold must hold something back"
    p = warp(verifier.table, config.sampling).double().numpy()
    if top_p < 1 or top_k > 0:
        assert (p == 0).any(), "the test must cut something off"
    assert not transitions[p == 0].any()
    expected = p * transitions.sum(axis=1, keepdims=True)
    chi_square = ((transitions - expected)[p > 0] ** 2 / expected[p > 0]).sum()
    assert chi_square < CHI_SQUARE_999[int((p > 0).sum()) - 5]


def test_calibration_changes_what_a_threshold_holds_back_and_never_a_draft() -> None:
    verifier, drafter, heads = toy(3, seed=7)

    def rounds(threshold: float, *temperatures: float) -> list[Round]:
        config = greedy(confidence_threshold=threshold, confidence_temperatures=temperatures)
        return speculative_decode(verifier, drafter, heads, [1], config).rounds

    assert rounds(0.0) == rounds(0.0, 0.1, 5.0, 2.0)
    plain, scaled = rounds(0.6), rounds(0.6, 9.0, 9.0, 9.0)
    assert sum(r.proposed for r in scaled) < sum(r.proposed for r in plain)
    assert plain[0].confidences == scaled[0].confidences, "the table keeps what the head said"
    with pytest.raises(CalibrationError, match="2 temperatures for 3 draft positions"):
        rounds(0.6, 1.0, 1.0)


def test_seed_decides_a_sampled_run() -> None:
    verifier, drafter, heads = toy(3, seed=7)

    def run(seed: int) -> DecodeResult:
        config = DecodeConfig(max_new_tokens=40, temperature=1.0, stop_ids=frozenset(), seed=seed)
        return speculative_decode(verifier, drafter, heads, [1], config)

    assert run(3).output_ids == run(3).output_ids
    assert run(3).output_ids != run(4).output_ids


def test_verifier_and_draft_cache_stay_in_step() -> None:
    verifier, drafter, heads = toy(4, seed=3)
    config = DecodeConfig(max_new_tokens=50, temperature=0.7, stop_ids=frozenset(), seed=1)
    result = speculative_decode(verifier, drafter, heads, [1, 2, 3], config)
    positions = [r.position for r in result.rounds]
    assert positions[0] == 3
    assert [b - a for a, b in itertools.pairwise(positions)] == [r.emitted for r in result.rounds[:-1]]
    assert verifier.rows == [], "a finished request leaves nothing behind"


def test_prompts_are_read_together_within_a_budget_of_padded_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, drafter, heads = toy(3, seed=7)
    reads: list[list[int]] = []
    add = verifier.add
    monkeypatch.setattr(verifier, "add", lambda prompts: reads.append([len(p) for p in prompts]) or add(prompts))
    monkeypatch.setattr("model.decoding.speculative.PREFILL_TOKENS", 8)
    requests = [Request([1] * length) for length in (3, 2, 4, 20, 1)]
    decoder = BatchDecoder(verifier, BlockDrafter(drafter, heads), greedy(max_new_tokens=4), batch_size=4)
    decode_all(decoder, requests)
    assert reads == [[3, 2], [4], [20], [1]]  # [3, 2, 4] would be 12 padded tokens; the last waits for a place


def test_an_empty_prompt_is_refused() -> None:
    verifier, _, _ = toy(3, seed=7)
    with pytest.raises(DecodingError, match="empty prompt"):
        BatchDecoder(verifier, None, greedy(), batch_size=1).submit(Request([]))


def test_a_schedule_decides_how_many_drafts_are_verified() -> None:
    verifier, drafter, heads = toy(3, seed=7)
    seen: list[tuple[int, ...]] = []

    def schedule(confidences_BK: Tensor) -> list[int]:
        seen.append(tuple(confidences_BK.shape))
        return [row % 2 for row in range(len(confidences_BK))]

    config = greedy(max_new_tokens=6)
    block = BlockDrafter(drafter, heads)
    results = decode_all(
        BatchDecoder(verifier, block, config, batch_size=2, schedule=schedule), [Request([1]), Request([2])]
    )
    assert [r.output_ids for r in results] == [target_decode(verifier, [t], config).output_ids for t in (1, 2)]
    assert {r.proposed for r in results[0].rounds} == {0}
    assert 1 in {r.proposed for r in results[1].rounds}
    assert all(shape[1] == 3 for shape in seen)


def test_stop_token_from_prefill_needs_no_round() -> None:
    verifier, drafter, heads = toy(3, seed=7)
    first = int(verifier.table[2].argmax())
    result = speculative_decode(verifier, drafter, heads, [2], greedy(stop_ids=frozenset([first])))
    assert result.output_ids == [first]
    assert result.rounds == []
    assert result.seconds_per_token == 0.0


def test_errors_name_what_is_wrong() -> None:
    verifier, drafter, heads = toy(3, seed=7)
    with pytest.raises(DecodingError, match="max_new_tokens 0"):
        greedy(max_new_tokens=0)
    with pytest.raises(DecodingError, match="width 9, the drafter reads 8"):
        speculative_decode(TableVerifier(verifier.table, 9), drafter, heads, [1], greedy())
    plain = DSparkDrafter(drafter_config(enable_confidence_head=False, confidence_head_with_markov=False))
    with pytest.raises(DecodingError, match="needs a drafter with a confidence head"):
        speculative_decode(verifier, plain, heads, [1], greedy(confidence_threshold=0.5))
