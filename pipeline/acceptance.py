"""What the rounds of speculative decoding say: accepted length, acceptance by position, speed-up. Pure functions.

How rounds count, also those that something cut short:
- Accepted length τ is the mean of the tokens a round commits: its accepted drafts and the bonus (or correction) token.
- A stop token among the accepted drafts ends its round there, without a bonus token: the drafts behind it count as
  not proposed, and the round commits as many tokens as it accepted.
- A round that passes max_new_tokens counts in full: the text is cut, the round's numbers are not.
- The first token of an answer comes from prefill and belongs to no round.
So, with U_k the share of all rounds that accepted at least k drafts (prefix survival, unconditional) and C_k the
acceptance at k given that 1..k-1 were accepted and k was proposed:
    mean accepted drafts = Σ_k U_k,    τ = Σ_k U_k + 1 - (share of rounds that a stop token ended),
and U_k = Π_{j<=k} C_j where no round was cut. Legend: P prompts, K draft positions, R bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ALL_DOMAINS = "all"
TRAINED, UNTRAINED = "trained", "untrained"
RESAMPLES = 2000
"""Bootstrap resamples behind every 95 % interval."""
_SMALLEST_BUCKET = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRow:
    """One draft + verify of an evaluation."""

    drafter: str
    temperature: float
    domain: str
    language: str
    prompt_id: str
    turn: int
    round: int
    """Number of the round within its answer, from 0."""
    position: int
    """Tokens before the anchor, prompt included."""
    proposed: int
    """Drafts that were verified; when a stop token among the accepted ended the round, those up to it."""
    accepted: int
    emitted: int
    """Tokens committed: accepted + 1, or accepted when a stop token ended the round."""
    draft_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """One decoding of one turn, by a drafter or by the target alone; times are wall-clock seconds."""

    drafter: str
    """Name of the drafter, or TARGET_ALONE."""
    temperature: float
    domain: str
    language: str
    prompt_id: str
    turn: int
    prompt_tokens: int
    output_ids: tuple[int, ...]
    finish: str
    """stop, or length when max_new_tokens ended it."""
    rounds: int
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float


TARGET_ALONE = "target"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % bootstrap interval over prompts; the bounds are None with fewer than two such prompts."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRate:
    """Acceptance at one draft position (from 1)."""

    position: int
    reached: int
    """Rounds that accepted every draft before this one and proposed it: the conditional rate's denominator."""
    accepted: int
    """Rounds that accepted at least this many drafts."""
    conditional: Estimate | None
    """accepted / reached; None when no round came here."""
    unconditional: Estimate
    """Prefix survival: accepted / all rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceSummary:
    """Acceptance of one drafter at one temperature in one domain, or over ALL_DOMAINS (every round weighs the same)."""

    drafter: str
    temperature: float
    domain: str
    prompts: int
    rounds: int
    stopped_rounds: int
    """Rounds that a stop token among the accepted drafts ended: they have no bonus token."""
    accepted_length: Estimate
    """τ: tokens per round, bonus token included."""
    accepted_drafts: Estimate
    """Accepted drafts per round, without the bonus token."""
    verify_rate: Estimate | None
    """Verified drafts that were accepted, of all that were verified; None when none was."""
    positions: tuple[PositionRate, ...]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A summary over all domains of the rounds that share one more property."""

    kind: str
    """language, or context length: tokens before the round, prompt included."""
    label: str
    summary: AcceptanceSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedSummary:
    """Speed-up η = T_target · τ / (T_draft + T_verify) and the times behind it, in seconds (DSpark §4).

    In a batch a step's time is shared equally by the requests in it, with and without drafts. All values are those of
    the answers that the target decoded alone as well, in batches of the same size; so is this τ.
    """

    drafter: str
    temperature: float
    target_seconds_per_token: float
    draft_seconds_per_round: float
    verify_seconds_per_round: float
    accepted_length: float
    speedup: float
    target_tokens: int
    """Tokens over which the target's own time was measured (after the first of each answer)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyCheck:
    """Whether greedy speculative output equals the target's own greedy output."""

    drafter: str
    compared: int
    equal: int
    differences: tuple[tuple[str, int, int], ...]
    """(prompt id, turn, first differing token of the answer) of every answer that differs."""


def summarise(rounds: Iterable[RoundRow], *, block_size: int, seed: int) -> list[AcceptanceSummary]:
    """One summary per (drafter, temperature, domain) and one over all domains; groups in order of first appearance."""
    groups: dict[tuple[str, float], dict[str, list[RoundRow]]] = {}
    for row in rounds:
        groups.setdefault((row.drafter, row.temperature), {}).setdefault(row.domain, []).append(row)
    summaries = []
    for domains in groups.values():
        for domain, rows in domains.items():
            summaries.append(summarise_group(rows, domain=domain, block_size=block_size, seed=seed))
        everything = [row for rows in domains.values() for row in rows]
        summaries.append(summarise_group(everything, domain=ALL_DOMAINS, block_size=block_size, seed=seed))
    return summaries


def summarise_group(rows: Sequence[RoundRow], *, domain: str, block_size: int, seed: int) -> AcceptanceSummary:
    """The summary of rounds that share drafter and temperature. Raises ValueError without rounds."""
    if not rows:
        raise ValueError("no rounds to summarise")
    prompt_of, prompts = _prompt_index(rows)
    accepted = np.array([row.accepted for row in rows])
    proposed = np.array([row.proposed for row in rows])
    emitted = np.array([row.emitted for row in rows])
    k = np.arange(1, block_size + 1)
    survived_NK = accepted[:, None] >= k
    reached_NK = (accepted[:, None] >= k - 1) & (proposed[:, None] >= k)
    rounds_P = _per_prompt(np.ones(len(rows)), prompt_of, prompts)
    survived_PK = _per_prompt(survived_NK, prompt_of, prompts)
    reached_PK = _per_prompt(reached_NK, prompt_of, prompts)
    weights_RP = _resamples(prompts, seed)

    def ratio(numerator_P: np.ndarray, denominator_P: np.ndarray) -> Estimate:
        return _ratio(numerator_P, denominator_P, weights_RP)

    positions = tuple(
        PositionRate(
            position=int(k[i]),
            reached=int(reached_NK[:, i].sum()),
            accepted=int(survived_NK[:, i].sum()),
            conditional=ratio(survived_PK[:, i], reached_PK[:, i]) if reached_NK[:, i].any() else None,
            unconditional=ratio(survived_PK[:, i], rounds_P),
        )
        for i in range(block_size)
    )
    return AcceptanceSummary(
        drafter=rows[0].drafter,
        temperature=rows[0].temperature,
        domain=domain,
        prompts=prompts,
        rounds=len(rows),
        stopped_rounds=int((emitted == accepted).sum()),
        accepted_length=ratio(_per_prompt(emitted, prompt_of, prompts), rounds_P),
        accepted_drafts=ratio(_per_prompt(accepted, prompt_of, prompts), rounds_P),
        verify_rate=(
            ratio(_per_prompt(accepted, prompt_of, prompts), _per_prompt(proposed, prompt_of, prompts))
            if proposed.any()
            else None
        ),
        positions=positions,
    )


def context_bucket(position: int) -> str:
    """The context length before a round, in powers of two from 128 on: "under 128", "128-255", ..."""
    if position < _SMALLEST_BUCKET:
        return f"under {_SMALLEST_BUCKET}"
    low = 2 ** (position.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def break_down(rounds: Sequence[RoundRow], *, block_size: int, seed: int) -> list[Breakdown]:
    """Summaries by language and by context length, per drafter and temperature; a grouping of one group is left out."""
    groupings: dict[str, Callable[[RoundRow], str]] = {
        "language": lambda row: row.language,
        "context length": lambda row: context_bucket(row.position),
    }
    breakdowns = []
    for kind, label_of in groupings.items():
        order = sorted(rounds, key=lambda row: row.position) if kind == "context length" else rounds
        labels = list(dict.fromkeys(label_of(row) for row in order))
        if len(labels) < 2:
            continue
        for drafter, temperature in dict.fromkeys((row.drafter, row.temperature) for row in rounds):
            for label in labels:
                rows = [
                    row
                    for row in rounds
                    if (row.drafter, row.temperature, label_of(row)) == (drafter, temperature, label)
                ]
                if rows:
                    summary = summarise_group(rows, domain=ALL_DOMAINS, block_size=block_size, seed=seed)
                    breakdowns.append(Breakdown(kind, label, summary))
    return breakdowns


def _prompt_index(rows: Sequence[RoundRow]) -> tuple[np.ndarray, int]:
    index: dict[str, int] = {}
    prompt_of = np.array([index.setdefault(row.prompt_id, len(index)) for row in rows])
    return prompt_of, len(index)


def _per_prompt(values: np.ndarray, prompt_of: np.ndarray, prompts: int) -> np.ndarray:
    sums = np.zeros((prompts, *values.shape[1:]))
    np.add.at(sums, prompt_of, values)
    return sums


def _resamples(prompts: int, seed: int) -> np.ndarray:
    """How often each resample draws each prompt, [R,P]. Prompts are the units: rounds of one are not independent."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)


def _ratio(numerator_P: np.ndarray, denominator_P: np.ndarray, weights_RP: np.ndarray) -> Estimate:
    value = float(numerator_P.sum() / denominator_P.sum())
    if np.count_nonzero(denominator_P) < 2:
        return Estimate(value, None, None)
    numerators, denominators = weights_RP @ numerator_P, weights_RP @ denominator_P
    drawn = numerators[denominators > 0] / denominators[denominators > 0]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def summarise_speed(rounds: Sequence[RoundRow], decodes: Sequence[DecodeRow]) -> list[SpeedSummary]:
    """η per (drafter, temperature) over all domains; groups without any measurement of the target are left out.

    Only answers that the target decoded alone as well enter: those met every decoder in batches of the same size.
    """
    alone = {_answer(d): d for d in decodes if d.drafter == TARGET_ALONE}
    compared = [row for row in rounds if _answer(row) in alone]
    summaries = []
    for drafter, temperature in dict.fromkeys((row.drafter, row.temperature) for row in compared):
        group = (drafter, temperature)
        own = [d for d in alone.values() if d.temperature == temperature]
        tokens = sum(len(d.output_ids) - 1 for d in own)  # the first token of an answer comes from prefill
        if not tokens:
            continue
        mine = [d for d in decodes if (d.drafter, d.temperature) == group and _answer(d) in alone]
        emitted = [row.emitted for row in compared if (row.drafter, row.temperature) == group]
        target = sum(d.verify_seconds for d in own) / tokens
        draft = sum(d.draft_seconds for d in mine) / len(emitted)
        verify = sum(d.verify_seconds for d in mine) / len(emitted)
        tau = sum(emitted) / len(emitted)
        summaries.append(
            SpeedSummary(
                drafter=drafter,
                temperature=temperature,
                target_seconds_per_token=target,
                draft_seconds_per_round=draft,
                verify_seconds_per_round=verify,
                accepted_length=tau,
                speedup=speedup(target, tau, draft, verify),
                target_tokens=tokens,
            )
        )
    return summaries


def _answer(row: RoundRow | DecodeRow) -> tuple[float, str, int]:
    return row.temperature, row.prompt_id, row.turn


def speedup(target: float, accepted_length: float, draft: float, verify: float) -> float:
    """η = T_target · τ / (T_draft + T_verify); the times are seconds per token, per round and per round."""
    return target * accepted_length / (draft + verify)


def check_greedy(decodes: Sequence[DecodeRow]) -> list[GreedyCheck]:
    """Compare each drafter's greedy answers with the target's own for the same prompt and turn."""
    greedy = [d for d in decodes if d.temperature == 0]
    own = {(d.prompt_id, d.turn): d.output_ids for d in greedy if d.drafter == TARGET_ALONE}
    checks = []
    for drafter in dict.fromkeys(d.drafter for d in greedy if d.drafter != TARGET_ALONE):
        compared = [d for d in greedy if d.drafter == drafter and (d.prompt_id, d.turn) in own]
        differences = tuple(
            (d.prompt_id, d.turn, first_difference(d.output_ids, own[d.prompt_id, d.turn]))
            for d in compared
            if d.output_ids != own[d.prompt_id, d.turn]
        )
        checks.append(
            GreedyCheck(
                drafter=drafter,
                compared=len(compared),
                equal=len(compared) - len(differences),
                differences=differences,
            )
        )
    return checks


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first differing token of two unequal sequences; the shorter one's length if it is a prefix."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)
