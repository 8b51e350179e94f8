"""The identities between the reported numbers, on rounds whose statistics are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.acceptance import (
    ALL_DOMAINS,
    TARGET_ALONE,
    DecodeRow,
    RoundRow,
    check_greedy,
    first_difference,
    speedup,
    summarise,
    summarise_group,
    summarise_speed,
)

GAMMA = 3


def make_round(
    accepted: int, *, stopped: bool = False, prompt: str = "p0", domain: str = "math", **changes
) -> RoundRow:
    fields = {
        "drafter": "trained",
        "temperature": 0.0,
        "domain": domain,
        "language": "none",
        "prompt_id": prompt,
        "turn": 0,
        "round": 0,
        "position": 10,
        "proposed": accepted if stopped else GAMMA,
        "accepted": accepted,
        "emitted": accepted if stopped else accepted + 1,
    }
    return RoundRow(**{**fields, **changes})


def make_decode(drafter: str, output: tuple[int, ...], **changes) -> DecodeRow:
    fields = {
        "temperature": 0.0,
        "domain": "math",
        "language": "none",
        "prompt_id": "p0",
        "turn": 0,
        "prompt_tokens": 4,
        "finish": "length",
        "rounds": 2,
        "prefill_seconds": 1.0,
        "draft_seconds": 0.2,
        "verify_seconds": 0.4,
    }
    return DecodeRow(drafter=drafter, output_ids=output, **{**fields, **changes})


def rounds_with_rates(rates: list[float], total: int) -> list[RoundRow]:
    """Rounds whose conditional acceptance rates are exactly `rates`."""
    survivors = [total]
    for rate in rates:
        survivors.append(round(survivors[-1] * rate))
    rounds = []
    for k in range(len(rates)):
        rounds += [make_round(k)] * (survivors[k] - survivors[k + 1])
    return rounds + [make_round(len(rates))] * survivors[-1]


def test_accepted_length_of_known_conditional_rates() -> None:
    # 1 + 0.9 + 0.72 + 0.504: products of the conditional rates, never their sum (3.4).
    summary = summarise_group(rounds_with_rates([0.9, 0.8, 0.7], 1000), domain="math", block_size=GAMMA, seed=0)
    assert summary.accepted_length.value == pytest.approx(3.124)
    assert summary.accepted_drafts.value == pytest.approx(2.124)
    assert [p.conditional.value for p in summary.positions] == pytest.approx([0.9, 0.8, 0.7])
    assert [p.unconditional.value for p in summary.positions] == pytest.approx([0.9, 0.72, 0.504])


def test_a_stop_token_cuts_the_round_as_documented() -> None:
    rounds = [make_round(2, stopped=True), make_round(0), make_round(3), make_round(1)]
    summary = summarise_group(rounds, domain="math", block_size=GAMMA, seed=0)
    assert summary.stopped_rounds == 1
    assert summary.accepted_drafts.value == 6 / 4
    assert summary.accepted_length.value == (2 + 1 + 4 + 2) / 4
    # The cut round accepted both drafts it is said to have proposed, and says nothing about position 3.
    assert [(p.accepted, p.reached) for p in summary.positions] == [(3, 4), (2, 3), (1, 1)]


def test_position_that_no_round_reached_has_no_conditional_rate() -> None:
    summary = summarise_group([make_round(0), make_round(0)], domain="math", block_size=GAMMA, seed=0)
    assert summary.positions[1].conditional is None
    assert summary.positions[1].unconditional.value == 0.0
    assert summary.accepted_length.value == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, GAMMA), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40))
def test_identities_hold_for_any_accept_pattern(pattern: list[tuple[int, bool, int]]) -> None:
    rounds = [make_round(a, stopped=stop and a > 0, prompt=f"p{prompt}") for a, stop, prompt in pattern]
    summary = summarise_group(rounds, domain="math", block_size=GAMMA, seed=0)
    survival = [p.unconditional.value for p in summary.positions]
    assert sum(survival) == pytest.approx(summary.accepted_drafts.value)
    assert summary.accepted_length.value == pytest.approx(
        1 + summary.accepted_drafts.value - summary.stopped_rounds / summary.rounds
    )
    assert survival == sorted(survival, reverse=True)
    if summary.stopped_rounds == 0:
        conditional = [p.conditional.value if p.conditional else 0.0 for p in summary.positions]
        assert survival == pytest.approx([math.prod(conditional[: k + 1]) for k in range(GAMMA)])


def test_aggregate_is_the_mean_of_domains_weighted_by_rounds() -> None:
    rounds = [make_round(3, prompt="a", domain="code")] * 3 + [make_round(0, prompt="b", domain="chat")]
    by_domain = {s.domain: s for s in summarise(rounds, block_size=GAMMA, seed=0)}
    weighted = sum(by_domain[d].accepted_length.value * by_domain[d].rounds for d in ("code", "chat")) / 4
    assert list(by_domain) == ["code", "chat", ALL_DOMAINS]
    assert by_domain[ALL_DOMAINS].accepted_length.value == weighted == (4 * 3 + 1) / 4
    assert by_domain[ALL_DOMAINS].prompts == 2


def test_groups_are_kept_apart_by_drafter_and_temperature() -> None:
    rounds = [make_round(3), make_round(0, drafter="untrained"), make_round(1, temperature=1.0)]
    found = {(s.drafter, s.temperature): s.accepted_length.value for s in summarise(rounds, block_size=GAMMA, seed=0)}
    assert found == {("trained", 0.0): 4, ("untrained", 0.0): 1, ("trained", 1.0): 2}


def test_interval_resamples_prompts_not_rounds() -> None:
    # Within a prompt every round is alike: 50 rounds of 2 prompts are worth 2 observations, not 100.
    two = [make_round(3, prompt="a")] * 50 + [make_round(0, prompt="b")] * 50
    many = [make_round(3 if i % 2 else 0, prompt=f"p{i}") for i in range(100)]
    wide = summarise_group(two, domain="math", block_size=GAMMA, seed=0).accepted_length
    narrow = summarise_group(many, domain="math", block_size=GAMMA, seed=0).accepted_length
    assert (wide.low, wide.high) == (1.0, 4.0)
    assert narrow.low < narrow.value < narrow.high
    assert narrow.high - narrow.low < 1.0


def test_one_prompt_has_no_interval_and_the_seed_fixes_the_others() -> None:
    assert summarise_group([make_round(1)], domain="math", block_size=GAMMA, seed=0).accepted_length.low is None
    # Two prompts, but only one of them reached position 2.
    reached_once = summarise_group([make_round(1), make_round(0, prompt="p1")], domain="m", block_size=GAMMA, seed=0)
    assert reached_once.positions[0].conditional.low is not None
    assert reached_once.positions[1].conditional.low is None
    rounds = [make_round(i % 4, prompt=f"p{i}") for i in range(20)]
    first, again = (summarise_group(rounds, domain="math", block_size=GAMMA, seed=5) for _ in range(2))
    assert first == again


def test_speed_up_uses_times_per_round_and_per_token() -> None:
    assert speedup(0.1, 3.0, 0.05, 0.1) == pytest.approx(2.0)
    target = make_decode(TARGET_ALONE, (1, 2, 3, 4, 5), verify_seconds=0.4, draft_seconds=0.0, rounds=0)
    spoken = make_decode("trained", (1, 2, 3, 4, 5), draft_seconds=0.1, verify_seconds=0.2)
    [summary] = summarise_speed([make_round(1), make_round(1)], [target, spoken])
    assert summary.target_seconds_per_token == pytest.approx(0.1)  # prefill gives the first of the five
    assert summary.draft_seconds_per_round == pytest.approx(0.05)
    assert summary.speedup == pytest.approx(0.1 * 2 / (0.05 + 0.1))
    assert summarise_speed([make_round(1, temperature=1.0)], [target, spoken]) == []


def test_speed_up_compares_only_answers_that_the_target_decoded_too() -> None:
    target = make_decode(TARGET_ALONE, (1, 2, 3, 4, 5), verify_seconds=0.4, draft_seconds=0.0, rounds=0)
    spoken = make_decode("trained", (1, 2, 3, 4, 5), draft_seconds=0.1, verify_seconds=0.2)
    # Another prompt, decoded in a larger batch: cheaper rounds, and more accepted.
    other = make_decode("trained", (1, 2, 3, 4, 5), prompt_id="p1", draft_seconds=0.001, verify_seconds=0.001)
    rounds = [make_round(1), make_round(1), make_round(3, prompt="p1")]
    assert summarise_speed(rounds, [target, spoken, other]) == summarise_speed(rounds[:2], [target, spoken])


def test_greedy_check_counts_and_locates_differences() -> None:
    decodes = [
        make_decode(TARGET_ALONE, (1, 2, 3)),
        make_decode("trained", (1, 2, 3)),
        make_decode(TARGET_ALONE, (1, 2, 3), prompt_id="p1"),
        make_decode("trained", (1, 9, 3), prompt_id="p1"),
        make_decode("trained", (7,), prompt_id="not measured by the target"),
        make_decode("trained", (8,), temperature=1.0),
    ]
    [check] = check_greedy(decodes)
    assert (check.compared, check.equal, check.differences) == (2, 1, (("p1", 0, 1),))


def test_first_difference_of_a_prefix_is_its_length() -> None:
    assert first_difference((1, 2), (1, 2, 3)) == 2
