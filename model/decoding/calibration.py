"""Calibration of confidences (DSpark §4): how wrong they are, and Sequential Temperature Scaling, which mends it.

The scheduler multiplies confidences: a_k = Π_{j≤k} c_j must be the probability that k drafts survive. So the k-th
temperature is fitted on the product, left to right, those before it fixed: each is the T that minimises the expected
calibration error of a_k, as far as that can be told from chance, with c_k = σ(logit(c_k) / T_k). Scaling changes no
draft and no order within a position.
Pure functions on float64 tensors. Legend: N rounds, K draft positions, M bins, S searched temperatures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.errors import CalibrationError

VERSION = 1
BINS = 15
LEAST_REACHED = 50
"""Rounds that must come to a position for a temperature of its own."""
_LOWEST, _HIGHEST = 0.1, 10.0
_COARSE, _FINE = 61, 41
# float32 confidences saturate; what is as good as certain keeps a finite logit.
_CERTAIN = 1e-7


@dataclass(frozen=True, slots=True)
class Rounds:
    """What calibration sees of recorded rounds."""

    confidences_NK: Tensor
    """float64 [N, K] in [0, 1]."""
    survived_NK: Tensor
    """bool [N, K]: drafts 1..k of the round were all accepted."""
    known_NK: Tensor
    """bool [N, K]: whether survival at k was decided: false behind what was verified, unless already rejected."""

    def __post_init__(self) -> None:
        """Raises CalibrationError for shapes that differ, no round at all, or a confidence outside [0, 1]."""
        shapes = {tuple(t.shape) for t in (self.confidences_NK, self.survived_NK, self.known_NK)}
        if len(shapes) != 1 or self.confidences_NK.dim() != 2 or not self.confidences_NK.numel():
            raise CalibrationError(f"rounds of shapes {sorted(shapes)}; wanted one [rounds, positions], not empty")
        if not bool(((self.confidences_NK >= 0) & (self.confidences_NK <= 1)).all()):
            raise CalibrationError("confidences outside [0, 1]; wanted probabilities, not logits")

    @property
    def reached_K(self) -> list[int]:
        """Rounds that came to each position: all drafts before it accepted, and its own verified."""
        before = torch.ones_like(self.survived_NK)
        before[:, 1:] = self.survived_NK[:, :-1]
        return (before & self.known_NK).sum(dim=0).tolist()

    @classmethod
    def from_counts(
        cls, confidences: Sequence[Sequence[float]], accepted: Sequence[int], proposed: Sequence[int]
    ) -> Rounds:
        """From a table of rounds: accepted and proposed drafts of each."""
        confidences_NK = torch.tensor(confidences, dtype=torch.float64)
        if confidences_NK.dim() != 2:
            raise CalibrationError("no rounds with confidences; evaluate a drafter that has a confidence head")
        positions = torch.arange(1, confidences_NK.shape[1] + 1)
        accepted_N1 = torch.tensor(accepted)[:, None]
        proposed_N1 = torch.tensor(proposed)[:, None]
        known = (positions <= proposed_N1) | (accepted_N1 < proposed_N1)
        return cls(confidences_NK, accepted_N1 >= positions, known)


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions that fall between two edges."""

    low: float
    high: float
    count: int
    predicted: float
    """Mean prediction; 0 in an empty bin."""
    observed: float
    """Share of events; 0 in an empty bin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How well probabilities foretell events."""

    count: int
    ece: float
    """Expected calibration error: mean |predicted - observed| over equally wide bins, weighted by their counts."""
    brier: float
    """Mean squared difference."""
    auroc: float | None
    """Probability that an event was given more than a non-event; None when there is only one of the two."""
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionQuality:
    """Quality at one draft position (from 1)."""

    position: int
    conditional: Quality | None
    """c_k over rounds that accepted 1..k-1; None where there was none."""
    prefix: Quality | None
    """a_k, the product up to k, over all rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Fitted temperatures, one per draft position, and what is known about them (JSON types)."""

    temperatures: tuple[float, ...]
    fitted_on: dict[str, Any]
    """Rounds, prompts, drafter, evaluation."""
    before: tuple[PositionQuality, ...]
    after: tuple[PositionQuality, ...]
    """On the rounds that were kept out of the fit, where there are any."""

    def to_json(self) -> str:
        """The versioned text that `from_json` reads."""
        data = {"version": VERSION, "method": "sequential_temperature_scaling", **asdict(self)}
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, *, source: str) -> Calibration:
    """Read a saved calibration. Raises CalibrationError naming `source` for another version or a broken file."""
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise CalibrationError(
                f"{source}: calibration version {data['version']}, this program reads {VERSION}; fit it again"
            )
        return Calibration(
            temperatures=check_temperatures(data["temperatures"], source=source),
            fitted_on=data["fitted_on"],
            before=tuple(_position_from(item) for item in data["before"]),
            after=tuple(_position_from(item) for item in data["after"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{source}: not a calibration: {type(error).__name__}: {error}") from error


def check_temperatures(values: Any, *, source: str) -> tuple[float, ...]:
    """Temperatures as floats. Raises CalibrationError unless they are positive finite numbers."""
    if not isinstance(values, list | tuple) or not values:
        raise CalibrationError(f"{source}: temperatures are {values!r}; wanted a list, one per draft position")
    wrong = [v for v in values if not isinstance(v, int | float) or not math.isfinite(v) or v <= 0]
    if wrong:
        raise CalibrationError(f"{source}: temperatures {wrong} are not positive numbers")
    return tuple(float(value) for value in values)


def scale(confidences: Tensor, temperatures: Sequence[float]) -> Tensor:
    """σ(logit(c_k) / T_k) of confidences [..., K], float64. Raises CalibrationError for another number of positions."""
    if confidences.shape[-1] != len(temperatures):
        raise CalibrationError(
            f"{len(temperatures)} temperatures for {confidences.shape[-1]} draft positions; fit this drafter again"
        )
    divisors = torch.tensor(temperatures, dtype=torch.float64, device=confidences.device)
    return torch.sigmoid(_logits(confidences) / divisors)


class _Scores(NamedTuple):
    """float64 [S] each, of S temperatures."""

    ece: Tensor
    chance: Tensor
    """The ECE that as many rounds give a calibrated predictor by chance."""
    brier: Tensor


def fit_temperatures(rounds: Rounds) -> tuple[float, ...]:
    """Sequential Temperature Scaling, one temperature per position.

    Where fewer than LEAST_REACHED rounds came, the temperature of the position before is the best guess (1 at first).
    """
    logits_NK = _logits(rounds.confidences_NK)
    product_N = torch.ones(len(logits_NK), dtype=torch.float64)
    temperatures = [1.0]
    for k, reached in enumerate(rounds.reached_K):
        found = temperatures[-1]
        if reached >= LEAST_REACHED:
            known = rounds.known_NK[:, k]
            before, logits, events = product_N[known], logits_NK[known, k], rounds.survived_NK[known, k].double()
            found = _minimise(partial(_scores_at, before, logits, events))
        temperatures.append(found)
        product_N = product_N * torch.sigmoid(logits_NK[:, k] / found)
    return tuple(temperatures[1:])


def _scores_at(before_N: Tensor, logits_N: Tensor, events_N: Tensor, temperatures_S: Tensor) -> _Scores:
    return _score(before_N * torch.sigmoid(logits_N / temperatures_S[:, None]), events_N)


def fit_shared_temperature(rounds: Rounds) -> float:
    """The one temperature for all positions with the smallest mean ECE of the products.

    For engines that read no temperatures: dividing the confidence head's weights and bias by it is exact.
    """
    return _minimise(partial(_scores_of_all, rounds))


def _scores_of_all(rounds: Rounds, temperatures_S: Tensor) -> _Scores:
    products = torch.sigmoid(_logits(rounds.confidences_NK) / temperatures_S[:, None, None]).cumprod(dim=-1)
    total = torch.zeros(3, len(temperatures_S), dtype=torch.float64)
    for k in range(products.shape[-1]):
        known = rounds.known_NK[:, k]
        if bool(known.any()):
            total += torch.stack(_score(products[:, known, k], rounds.survived_NK[known, k].double()))
    return _Scores(*total)


def _minimise(scores: Callable[[Tensor], _Scores]) -> float:
    """The best temperature of a logarithmic grid, refined once: an ECE has jumps, so there is no slope to follow.

    An ECE no larger than chance gives is no evidence against a temperature; among those (or of the smallest ECE, where
    none is as small as that) the Brier score decides. Without it a few hundred rounds would fit their own noise.
    """
    low, high, best = math.log(_LOWEST), math.log(_HIGHEST), 0.0
    for steps in (_COARSE, _FINE):
        grid = torch.linspace(low, high, steps, dtype=torch.float64)
        found = scores(grid.exp())
        eligible = found.ece <= torch.maximum(found.ece.min(), found.chance)
        best = float(grid[found.brier.masked_fill(~eligible, torch.inf).argmin()])
        step = float(grid[1] - grid[0])
        low, high = max(low, best - step), min(high, best + step)
    return math.exp(best)


def _score(predicted_SN: Tensor, events_N: Tensor) -> _Scores:
    sums = _bin_sums(predicted_SN, events_N)
    count, rate = sums[..., 0], sums[..., 1] / sums[..., 0].clamp_min(1)
    # The mean absolute deviation of a sum of n Bernoulli(p) draws is about sqrt(2 n p (1 - p) / π).
    chance = (2 / math.pi * count * rate * (1 - rate)).clamp_min(0).sqrt().sum(dim=-1) / len(events_N)
    return _Scores(_ece(sums), chance, (predicted_SN - events_N).square().mean(dim=-1))


def expected_calibration_error(predicted: Tensor, events_N: Tensor) -> Tensor:
    """ECE of predictions [..., N] against events [N] in BINS equally wide bins, float64 [...]."""
    return _ece(_bin_sums(predicted, events_N))


def _ece(sums: Tensor) -> Tensor:
    return (sums[..., 1] - sums[..., 2]).abs().sum(dim=-1) / sums[..., 0].sum(dim=-1)


def _bin_sums(predicted: Tensor, events_N: Tensor) -> Tensor:
    """(count, Σ predicted, Σ events) per bin: [..., M, 3]."""
    bins = (predicted * BINS).long().clamp_(0, BINS - 1)
    values = torch.stack([torch.ones_like(predicted), predicted, events_N.expand_as(predicted)], dim=-1)
    sums = predicted.new_zeros(*predicted.shape[:-1], BINS, 3)
    return sums.scatter_add_(-2, bins[..., None].expand_as(values), values)


def measure(predicted_N: Tensor, events_N: Tensor) -> Quality:
    """Quality of at least one prediction."""
    events = events_N.double()
    sums = _bin_sums(predicted_N, events)
    bins = tuple(
        Bin(
            low=index / BINS,
            high=(index + 1) / BINS,
            count=int(count),
            predicted=float(total / count) if count else 0.0,
            observed=float(seen / count) if count else 0.0,
        )
        for index, (count, total, seen) in enumerate(sums)
    )
    return Quality(
        count=len(events),
        ece=float(expected_calibration_error(predicted_N, events)),
        brier=float((predicted_N - events).square().mean()),
        auroc=_auroc(predicted_N, events_N.bool()),
        bins=bins,
    )


def _auroc(predicted_N: Tensor, events_N: Tensor) -> float | None:
    """By ranks; equal predictions count half."""
    positives, negatives = int(events_N.sum()), int((~events_N).sum())
    if not positives or not negatives:
        return None
    _, inverse, counts = torch.unique(predicted_N, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[inverse]
    return float((ranks[events_N].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def measure_positions(rounds: Rounds, temperatures: Sequence[float] | None = None) -> tuple[PositionQuality, ...]:
    """Quality per position of the confidences, scaled if temperatures are given."""
    c_NK = rounds.confidences_NK if temperatures is None else scale(rounds.confidences_NK, temperatures)
    a_NK = c_NK.cumprod(dim=1)
    qualities = []
    for k in range(c_NK.shape[1]):
        known, events = rounds.known_NK[:, k], rounds.survived_NK[:, k]
        reached = known & (rounds.survived_NK[:, k - 1] if k else torch.ones_like(known))
        qualities.append(
            PositionQuality(
                position=k + 1,
                conditional=measure(c_NK[reached, k], events[reached]) if bool(reached.any()) else None,
                prefix=measure(a_NK[known, k], events[known]) if bool(known.any()) else None,
            )
        )
    return tuple(qualities)


def _logits(confidences: Tensor) -> Tensor:
    return torch.logit(confidences.double(), eps=_CERTAIN)


def _position_from(data: Mapping[str, Any]) -> PositionQuality:
    qualities = {name: _quality_from(data[name]) for name in ("conditional", "prefix")}
    return PositionQuality(position=data["position"], **qualities)


def _quality_from(data: Mapping[str, Any] | None) -> Quality | None:
    if data is None:
        return None
    return Quality(**{**data, "bins": tuple(Bin(**item) for item in data["bins"])})
