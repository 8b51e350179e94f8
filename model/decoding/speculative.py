"""The draft-verify loop (DSpark §2, §4) over a batch of requests, and plain decoding by the same loop.

Requests have prompts of any length, finish and leave, and waiting ones take their places. Target and drafter keep
their caches in step: both hold every committed position before the anchor, which is the last committed token and has
been read by neither. A request's tokens depend on its own seed, never on the requests beside it (up to the rounding of
the target's matrix products). Legend: B rows, n tokens, C = L·D captured width, V vocabulary, K = γ draft positions.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model.decoding.calibration import scale
from model.decoding.chain_drafting import make_drafter
from model.decoding.drafting import Drafter, Proposal
from model.decoding.sampling import Sampling, Verdict, draw, verify_greedy, verify_sampled, warp
from model.errors import DecodingError
from model.family import AnyDrafter
from model.target_heads import TargetHeads

PREFILL_TOKENS = 16384
"""Padded prompt tokens that are read in one forward; a longer prompt is read alone."""
Schedule = Callable[[Tensor], Sequence[int]]
"""Confidences float32 [B, K] to the number of drafts of each row to verify; must not look at later tokens."""


class Reading(NamedTuple):
    """What the target says about tokens it just read; columns behind a row's own tokens hold anything."""

    logits: Tensor
    """float32 [B, n, V]; column i predicts the token after the row's i-th. After `add` n = 1: only the last matters."""
    hidden: Tensor
    """[B, n, C]: the captured layers' outputs, layers ascending."""


class Verifier(Protocol):
    """The target with a cache of its own. Rows stand in the order in which they were added."""

    def add(self, prompts: Sequence[Sequence[int]]) -> Reading:
        """Append rows and read their prompts; the reading is of the new rows alone."""

    def extend(self, token_ids: Sequence[Sequence[int]]) -> Reading:
        """Read more tokens of every row."""

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget each row's tokens from position lengths[b] on."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How to decode; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int
    """Added to every request's own."""
    top_p: float = 1.0
    top_k: int = -1
    confidence_threshold: float = 0.0
    """Propose only the drafts before the first whose confidence is below this; 0 proposes all."""
    confidence_temperatures: tuple[float, ...] = ()
    """Calibration of what the threshold (or a schedule) sees, one per draft position; empty: as the head says."""

    def __post_init__(self) -> None:
        """Raises DecodingError for impossible settings."""
        if self.max_new_tokens < 1 or not 0 <= self.confidence_threshold <= 1:
            raise DecodingError(
                f"max_new_tokens {self.max_new_tokens} (at least 1), confidence_threshold "
                f"{self.confidence_threshold} (0 to 1): out of range"
            )
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """What the target's and the drafter's logits are sampled with."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue."""

    prompt_ids: Sequence[int]
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One draft + verify."""

    position: int
    """Position of the anchor, prompt included."""
    draft_ids: tuple[int, ...]
    """All K drafted tokens, also those that were held back."""
    confidences: tuple[float, ...]
    """Probabilities of all K slots; empty without a confidence head."""
    proposed: int
    """Drafts that were verified; when a stop token among the accepted ended the round, those up to it."""
    accepted: int
    emitted: int
    """Accepted length: accepted drafts + correction or bonus token (which a stop token among the drafts forgoes)."""


@dataclasses.dataclass(slots=True)
class Seconds:
    """Wall-clock seconds by phase; a request's equal share of what its batch took."""

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


class Finished(NamedTuple):
    """A request that left the batch."""

    request: Request
    result: DecodeResult


@dataclasses.dataclass(slots=True)
class _Row:
    request: Request
    generator: torch.Generator
    output: list[int] = dataclasses.field(default_factory=list)
    rounds: list[Round] = dataclasses.field(default_factory=list)
    seconds: Seconds = dataclasses.field(default_factory=Seconds)

    @property
    def position(self) -> int:
        """Position of the last committed token."""
        return len(self.request.prompt_ids) + len(self.output) - 1


class BatchDecoder:
    """Decodes up to `batch_size` requests at a time; without a drafter one token per step: the target alone.

    It takes the verifier over: rows that anyone left there are dropped. `drafter` must be fresh. `schedule` decides how
    many drafts are verified; None applies the config's confidence_threshold.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        config: DecodeConfig,
        *,
        batch_size: int,
        schedule: Schedule | None = None,
    ) -> None:
        if drafter and (config.confidence_threshold > 0 or schedule) and not drafter.has_confidence:
            raise DecodingError("confidence_threshold needs a drafter with a confidence head; set it to 0")
        self._verifier, self._drafter, self._config = verifier, drafter, config
        self._sampling, self._batch_size = config.sampling, batch_size
        threshold = config.confidence_threshold
        self._schedule = schedule or (threshold_schedule(threshold) if threshold > 0 else None)
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        verifier.keep([])

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._rows or self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins when a place is free. Raises DecodingError for an empty prompt."""
        if not request.prompt_ids:
            raise DecodingError("a request has an empty prompt; wanted at least one token")
        self._waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Let waiting requests join, run one round, and return the requests that ended."""
        while self._waiting and len(self._rows) < self._batch_size:
            self._join(self._next_prompts())
        finished = self._leave()
        if self._rows:
            self._round()
            finished += self._leave()
        return finished

    def _next_prompts(self) -> list[_Row]:
        """Waiting requests for one prefill: as many as places and PREFILL_TOKENS allow, at least one."""
        rows: list[_Row] = []
        longest = 0
        while self._waiting and len(self._rows) + len(rows) < self._batch_size:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if rows and longest * (len(rows) + 1) > PREFILL_TOKENS:
                break
            request = self._waiting.popleft()
            seed = (self._config.seed + request.seed) % 2**63
            rows.append(_Row(request, torch.Generator().manual_seed(seed)))
        return rows

    def _join(self, rows: list[_Row]) -> None:
        with _timed(rows, "prefill"):
            prompts = [row.request.prompt_ids for row in rows]
            reading = self._verifier.add(prompts)
            if self._drafter is not None:
                _check_width(reading.hidden, self._drafter)
                self._drafter.add(reading.hidden, prompts)
            first = self._choose(reading.logits[:, -1], _uniforms(rows, 1)[:, 0])
        for row, token in zip(rows, first.tolist(), strict=True):
            row.output.append(token)
        self._rows += rows

    def _choose(self, logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
        if self._sampling.greedy:
            return logits_BV.argmax(dim=-1)
        return draw(warp(logits_BV, self._sampling), uniforms_B.to(logits_BV.device))

    def _round(self) -> None:
        rows, drafter = self._rows, self._drafter
        block = drafter.block_size if drafter else 0
        uniforms = _uniforms(rows, 2 * block + 1)
        anchors = [row.output[-1] for row in rows]
        proposal, counts = None, [0] * len(rows)
        if drafter is not None:
            with _timed(rows, "draft"):
                proposal = drafter.propose(anchors, self._sampling, uniforms[:, :block])
                counts = self._counts(proposal, block)
        ids = proposal.token_ids.tolist() if proposal else [[] for _ in rows]
        with _timed(rows, "verify"):
            tokens = [[anchor, *draft[:n]] for anchor, draft, n in zip(anchors, ids, counts, strict=True)]
            reading = self._verifier.extend(tokens)
            verdict = self._verify(proposal, counts, reading.logits, uniforms[:, block:])
            accepted, following = verdict.accepted.tolist(), verdict.next_token.tolist()
            self._verifier.crop([row.position + 1 + n for row, n in zip(rows, accepted, strict=True)])
        if drafter is not None:
            with _timed(rows, "draft"):
                drafter.commit(reading.hidden, [line[: n + 1] for line, n in zip(tokens, accepted, strict=True)])
        self._record(proposal, counts, [[*d[:n], t] for d, n, t in zip(ids, accepted, following, strict=True)])

    def _counts(self, proposal: Proposal, block: int) -> list[int]:
        if self._schedule is None or proposal.confidences is None:
            return [block] * len(self._rows)
        confidences, temperatures = proposal.confidences, self._config.confidence_temperatures
        return list(self._schedule(scale(confidences, temperatures).float() if temperatures else confidences))

    def _verify(self, proposal: Proposal | None, counts: list[int], logits: Tensor, uniforms: Tensor) -> Verdict:
        """Verdicts from logits [B, 1 + max(counts), V]; drafts behind the longest proposal are left out."""
        device, width = logits.device, max(counts)
        proposed = torch.tensor(counts, device=device)
        if proposal is None:
            next_token = self._choose(logits[:, 0], uniforms[:, 0])
            return Verdict(torch.zeros_like(next_token), next_token)
        ids = proposal.token_ids[:, :width].to(device)
        if proposal.probabilities is None:
            return verify_greedy(ids, proposed, logits)
        drawn_from = proposal.probabilities[:, :width].to(device)
        chosen = torch.cat([uniforms[:, :width], uniforms[:, -1:]], dim=1).to(device)
        return verify_sampled(ids, proposed, drawn_from, warp(logits, self._sampling), chosen)

    def _record(self, proposal: Proposal | None, counts: list[int], committed: list[list[int]]) -> None:
        """Append what the round committed: up to a stop token among the accepted drafts, else one more than those."""
        confidences = proposal.confidences.tolist() if proposal and proposal.confidences is not None else None
        drafts = proposal.token_ids.tolist() if proposal else None
        for index, (row, tokens) in enumerate(zip(self._rows, committed, strict=True)):
            accepted = len(tokens) - 1
            stop = next((k for k, token in enumerate(tokens[:-1]) if token in self._config.stop_ids), None)
            emitted = tokens if stop is None else tokens[: stop + 1]
            if drafts is not None:
                row.rounds.append(
                    Round(
                        position=row.position,
                        draft_ids=tuple(drafts[index]),
                        confidences=tuple(confidences[index]) if confidences else (),
                        proposed=counts[index] if stop is None else len(emitted),
                        accepted=accepted if stop is None else len(emitted),
                        emitted=len(emitted),
                    )
                )
            row.output += emitted

    def _leave(self) -> list[Finished]:
        """Take out the rows that ended; the caches keep the others."""
        limit, stop_ids = self._config.max_new_tokens, self._config.stop_ids
        staying = [i for i, row in enumerate(self._rows) if len(row.output) < limit and row.output[-1] not in stop_ids]
        if len(staying) == len(self._rows):
            return []
        gone = [row for i, row in enumerate(self._rows) if i not in set(staying)]
        self._rows = [self._rows[i] for i in staying]
        self._verifier.keep(staying)
        if self._drafter is not None:
            self._drafter.keep(staying)
        return [Finished(row.request, DecodeResult(row.output[:limit], row.rounds, row.seconds)) for row in gone]


def threshold_schedule(threshold: float) -> Schedule:
    """Verify the drafts before the first whose confidence is below `threshold`.

    A confidence depends on the drafts before it alone, so the cut does not look ahead and nothing is lost.
    """

    def count(confidences_BK: Tensor) -> list[int]:
        return (confidences_BK >= threshold).long().cumprod(dim=1).sum(dim=1).tolist()

    return count


def decode_all(decoder: BatchDecoder, requests: Sequence[Request]) -> list[DecodeResult]:
    """Results in the order of the requests, which must be distinct objects."""
    for request in requests:
        decoder.submit(request)
    results: dict[int, DecodeResult] = {}
    while decoder.busy:
        results |= {id(finished.request): finished.result for finished in decoder.step()}
    return [results[id(request)] for request in requests]


def target_decode(verifier: Verifier, prompt_ids: Sequence[int], config: DecodeConfig) -> DecodeResult:
    """Plain autoregressive decoding of one prompt: what speculation must equal, and its time."""
    return decode_all(BatchDecoder(verifier, None, config, batch_size=1), [Request(prompt_ids)])[0]


def speculative_decode(
    verifier: Verifier, drafter: AnyDrafter, heads: TargetHeads, prompt_ids: Sequence[int], config: DecodeConfig
) -> DecodeResult:
    """Decode one prompt with drafts; the output is the target's own (greedy: token for token; else: in distribution).

    Raises DecodingError for a threshold without a confidence head, and for a verifier whose hidden states have
    another width than the drafter reads.
    """
    decoder = BatchDecoder(verifier, make_drafter(drafter, heads), config, batch_size=1)
    return decode_all(decoder, [Request(prompt_ids)])[0]


def _check_width(hidden: Tensor, drafter: Drafter) -> None:
    if hidden.shape[-1] != drafter.captured_width:
        raise DecodingError(
            f"the verifier returns hidden states of width {hidden.shape[-1]}, the drafter reads "
            f"{drafter.captured_width}; give the verifier the drafter's layer ids"
        )


def _uniforms(rows: Sequence[_Row], count: int) -> Tensor:
    """float64 [B, count], each row from its own generator: always as many, so that a draw never depends on others."""
    return torch.stack([torch.rand(count, generator=row.generator, dtype=torch.float64) for row in rows])


@contextmanager
def _timed(rows: Sequence[_Row], phase: str) -> Iterator[None]:
    """Share the block's time among the rows; on a GPU wait for its kernels, or it would be counted elsewhere."""
    started = time.perf_counter()
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    share = (time.perf_counter() - started) / len(rows)
    for row in rows:
        setattr(row.seconds, phase, getattr(row.seconds, phase) + share)
