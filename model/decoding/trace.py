"""What simulated requests do: rounds with the fate of their whole block, recorded or drawn from a formula.

The fate is fixed before any policy sees it, so no decision can influence its own luck.
Legend: N rounds, Q requests, K draft positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.errors import DecodingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Rounds of requests, in order. Raises DecodingError when the parts do not fit each other."""

    confidences_NK: np.ndarray
    """float32: what the scheduler sees, calibrated or not."""
    accepted_N: np.ndarray
    """int64: drafts of the whole block that verification would accept."""
    first_round_Q: np.ndarray
    """int64: index of each request's first round; the next request's is its end."""
    output_tokens_Q: np.ndarray
    """int64: tokens that each request generates after its first."""

    def __post_init__(self) -> None:
        """Check the parts against each other."""
        rounds, block = self.confidences_NK.shape
        counts = self.rounds_Q
        if (
            len(counts) == 0
            or self.first_round_Q[0] != 0
            or counts.min() < 1
            or self.accepted_N.shape != (rounds,)
            or self.output_tokens_Q.shape != counts.shape
            or self.output_tokens_Q.min() < 1
            or self.accepted_N.min() < 0
            or self.accepted_N.max() > block
        ):
            raise DecodingError(
                f"a trace of {rounds} rounds of {block} drafts and {len(counts)} requests does not fit together: "
                f"wanted at least one round and one token per request, and 0 to {block} accepted drafts per round"
            )

    @property
    def block_size(self) -> int:
        """K: drafts per round."""
        return int(self.confidences_NK.shape[1])

    @property
    def rounds_Q(self) -> np.ndarray:
        """int64: rounds of each request."""
        return np.diff(np.append(self.first_round_Q, len(self.confidences_NK)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParametricAcceptance:
    """Acceptance from a formula, where no rounds were recorded.

    The log-odds that a draft survives, given its predecessors did, are those of `first` minus `decay` per position,
    plus normal deviations of its request (topic), of its round (place in the text) and of its own. The defaults live
    in the job's configuration.
    """

    block_size: int
    first: float
    """Acceptance of the first draft of an average round."""
    decay: float
    request_spread: float
    round_spread: float
    draft_spread: float
    overconfidence: float
    """Confidence log-odds are the true ones times this: 1 is calibrated, 2 claims twice the certainty it has."""
    requests: int
    rounds_per_request: int
    mean_output_tokens: int
    """Outputs are uniform between half and one and a half times this."""

    def __post_init__(self) -> None:
        """Raises DecodingError for values out of range."""
        sizes = (self.block_size, self.requests, self.rounds_per_request, self.mean_output_tokens // 2)
        if not (0 < self.first < 1 and self.overconfidence > 0 and min(sizes) >= 1):
            raise DecodingError(
                f"first acceptance {self.first} (between 0 and 1), overconfidence {self.overconfidence} (above 0), "
                f"sizes {sizes} (at least 1): out of range"
            )


def parametric_trace(config: ParametricAcceptance, seed: int) -> Trace:
    """A trace drawn from the formula; the same seed gives the same trace."""
    rng = np.random.default_rng(seed)
    requests, rounds, block = config.requests, config.rounds_per_request, config.block_size
    log_odds = np.log(config.first / (1 - config.first)) - config.decay * np.arange(block)
    log_odds = (
        log_odds
        + config.request_spread * rng.standard_normal((requests, 1, 1))
        + config.round_spread * rng.standard_normal((requests, rounds, 1))
        + config.draft_spread * rng.standard_normal((requests, rounds, block))
    ).reshape(-1, block)
    survives = rng.random(log_odds.shape) < _sigmoid(log_odds)
    mean = config.mean_output_tokens
    return Trace(
        confidences_NK=_sigmoid(config.overconfidence * log_odds).astype(np.float32),
        accepted_N=np.cumprod(survives, axis=1).sum(axis=1).astype(np.int64),
        first_round_Q=np.arange(requests) * rounds,
        output_tokens_Q=rng.integers(mean // 2, mean + mean // 2, requests, endpoint=True),
    )


def _sigmoid(log_odds: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-log_odds))
