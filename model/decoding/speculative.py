"""The draft-verify loop (DSpark §2, §4) and plain decoding, over any target that implements Verifier.

The loop keeps two caches in step: the verifier's own and the drafter's context, which holds the target's hidden states
of every position before the anchor. The anchor itself is the last committed token: the target has not read it yet.
Legend: n tokens, C = L·D captured width, V vocabulary, K = γ draft positions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from model.decoding.sampling import Choice, Verdict, choose, probabilities, verify_greedy, verify_sampled
from model.drafter import DraftCache, DSparkDrafter
from model.errors import DecodingError
from model.target_heads import TargetHeads


class Verifier(Protocol):
    """The target with a cache of its own. Logits are float32 [n, V], hidden states [n, C] of the captured layers."""

    def start(self, prompt_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Forget everything, read the prompt. The last row of the logits predicts the first new token."""

    def extend(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read more tokens; row i predicts the token after token_ids[i]."""

    def crop(self, length: int) -> None:
        """Forget every token from position `length` on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How to decode; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int
    confidence_threshold: float = 0.0
    """Propose only the drafts before the first whose confidence is below this; 0 proposes all."""

    def __post_init__(self) -> None:
        """Raises DecodingError for impossible settings."""
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 <= self.confidence_threshold <= 1:
            raise DecodingError(
                f"max_new_tokens {self.max_new_tokens} (at least 1), temperature {self.temperature} (at least 0), "
                f"confidence_threshold {self.confidence_threshold} (0 to 1): out of range"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One draft + verify."""

    position: int
    """Position of the anchor, prompt included."""
    draft_ids: tuple[int, ...]
    """All K drafted tokens, also those the threshold held back."""
    confidences: tuple[float, ...]
    """Probabilities of all K slots; empty without a confidence head."""
    proposed: int
    """Drafts that were verified; when a stop token among the accepted ended the round, those up to it."""
    accepted: int
    emitted: int
    """Accepted length: accepted drafts + correction or bonus token (which a stop token among the drafts forgoes)."""


@dataclasses.dataclass(slots=True)
class Seconds:
    """Wall-clock seconds by phase."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeResult:
    """The new tokens (without the prompt, at most max_new_tokens) and how they came about.

    The first token comes from prefill and belongs to no round; the last round may overshoot: the output is cut, the
    round's numbers are not.
    """

    output_ids: list[int]
    rounds: list[Round]
    seconds: Seconds

    @property
    def seconds_per_token(self) -> float:
        """Decoding time without prefill per token after the first; 0 when there is none."""
        decoded = len(self.output_ids) - 1
        return (self.seconds.draft + self.seconds.verify) / decoded if decoded else 0.0

    @property
    def accepted_length(self) -> float:
        """τ: mean tokens per round, bonus included; 0 without rounds."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else 0.0


@torch.no_grad()
def target_decode(verifier: Verifier, prompt_ids: Sequence[int], config: DecodeConfig) -> DecodeResult:
    """Plain autoregressive decoding with the same verifier: what speculation must equal, and its time."""
    seconds = Seconds()
    with _timed(seconds, "prefill"):
        logits, _ = verifier.start(prompt_ids)
        generator = _generator(logits, config.seed)
        output = [choose(logits[-1], config.temperature, generator).token]
    while len(output) < config.max_new_tokens and output[-1] not in config.stop_ids:
        with _timed(seconds, "verify"):
            logits, _ = verifier.extend(output[-1:])
            output.append(choose(logits[-1], config.temperature, generator).token)
    return DecodeResult(output, [], seconds)


@torch.no_grad()
def speculative_decode(
    verifier: Verifier, drafter: DSparkDrafter, heads: TargetHeads, prompt_ids: Sequence[int], config: DecodeConfig
) -> DecodeResult:
    """Decode with drafts; the output is the target's own (greedy: token for token; else: in distribution).

    Raises DecodingError for a threshold without a confidence head, and for a verifier whose hidden states have
    another width than the drafter reads.
    """
    if config.confidence_threshold > 0 and drafter.confidence_head is None:
        raise DecodingError("confidence_threshold needs a drafter with a confidence head; set it to 0")
    seconds = Seconds()
    with _timed(seconds, "prefill"):
        logits, hidden = verifier.start(prompt_ids)
        _check_width(hidden, drafter)
        generator = _generator(logits, config.seed)
        output = [choose(logits[-1], config.temperature, generator).token]
        cache = drafter.new_cache()
        drafter.append_context(cache, hidden)
    rounds: list[Round] = []
    while len(output) < config.max_new_tokens and output[-1] not in config.stop_ids:
        position = cache.length
        with _timed(seconds, "draft"):
            draft = _draft(drafter, heads, (cache, output[-1]), config, generator)
        proposal = draft.choices[: draft.proposed]
        ids = [choice.token for choice in proposal]
        with _timed(seconds, "verify"):
            logits, hidden = verifier.extend([output[-1], *ids])
            verdict = _verify(proposal, logits, config.temperature, generator)
            verifier.crop(position + 1 + verdict.accepted)
        with _timed(seconds, "draft"):
            drafter.append_context(cache, hidden[: verdict.accepted + 1])
        emitted = _emitted(ids, verdict, config.stop_ids)
        stopped = len(emitted) <= verdict.accepted
        rounds.append(
            Round(
                position=position,
                draft_ids=tuple(choice.token for choice in draft.choices),
                confidences=draft.confidences,
                proposed=len(emitted) if stopped else len(ids),
                accepted=len(emitted) if stopped else verdict.accepted,
                emitted=len(emitted),
            )
        )
        output += emitted
    return DecodeResult(output[: config.max_new_tokens], rounds, seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class _Draft:
    choices: list[Choice]
    confidences: tuple[float, ...]
    proposed: int


def _draft(
    drafter: DSparkDrafter,
    heads: TargetHeads,
    start: tuple[DraftCache, int],
    config: DecodeConfig,
    generator: torch.Generator,
) -> _Draft:
    """One block: the backbone at once, then the sequential head token by token (DSpark §3.2)."""
    cache, previous = start
    hidden_KD = drafter.draft_block(cache, previous, heads)
    base_KV = heads.logits(hidden_KD).to(drafter.dtype)
    markov, state = drafter.markov_head, None
    choices: list[Choice] = []
    confidences: list[Tensor] = []
    for hidden, base in zip(hidden_KD, base_KV, strict=True):
        embedded, logits = None, base
        if markov is not None:
            embedded = markov.markov_w1(torch.tensor(previous, device=hidden.device))
            features, state = markov.step(embedded, hidden, state)
            logits = logits + markov.markov_w2(features)
        if drafter.confidence_head is not None:
            confidences.append(drafter.confidence_head(hidden, embedded))
        choices.append(choose(logits, config.temperature, generator))
        previous = choices[-1].token
    values = tuple(torch.stack(confidences).float().sigmoid().tolist()) if confidences else ()
    below = [k for k, value in enumerate(values) if value < config.confidence_threshold]
    return _Draft(choices, values, below[0] if below else len(choices))


def _verify(proposal: Sequence[Choice], logits: Tensor, temperature: float, generator: torch.Generator) -> Verdict:
    ids = [choice.token for choice in proposal]
    if temperature == 0:
        return verify_greedy(ids, logits)
    drawn_from = [choice.probabilities.to(logits.device) for choice in proposal if choice.probabilities is not None]
    return verify_sampled(ids, drawn_from, probabilities(logits, temperature), generator)


def _emitted(ids: list[int], verdict: Verdict, stop_ids: frozenset[int]) -> list[int]:
    """Tokens that a round commits: up to a stop token among the accepted drafts, else one more than those."""
    for index, token in enumerate(ids[: verdict.accepted]):
        if token in stop_ids:
            return ids[: index + 1]
    return [*ids[: verdict.accepted], verdict.next_token]


def _check_width(hidden: Tensor, drafter: DSparkDrafter) -> None:
    wanted = drafter.fc.in_features
    if hidden.shape[-1] != wanted:
        raise DecodingError(
            f"the verifier returns hidden states of width {hidden.shape[-1]}, the drafter reads {wanted} (layers "
            f"{list(drafter.config.target_layer_ids)}); give the verifier the same layer ids"
        )


def _generator(logits: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(device=logits.device).manual_seed(seed)


@contextmanager
def _timed(seconds: Seconds, phase: str) -> Iterator[None]:
    """Add the block's time; on a GPU wait for its kernels, or their time would be counted elsewhere."""
    started = time.perf_counter()
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    setattr(seconds, phase, getattr(seconds, phase) + time.perf_counter() - started)
