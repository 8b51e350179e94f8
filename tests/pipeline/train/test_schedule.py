from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.train.schedule import lr_at


def test_warm_up_is_linear_and_the_cosine_ends_at_zero() -> None:
    rates = [lr_at(step, total=50, peak=1.0, warmup_ratio=0.1) for step in range(50)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 44 / 45)))
    assert lr_at(50, total=50, peak=1.0, warmup_ratio=0.1) == pytest.approx(0.0, abs=1e-15)


@given(total=st.integers(1, 500), ratio=st.floats(0, 0.9))
def test_rate_rises_then_falls_within_bounds(total: int, ratio: float) -> None:
    rates = [lr_at(step, total=total, peak=6e-4, warmup_ratio=ratio) for step in range(total)]
    warmup = math.ceil(ratio * total)
    assert all(0 < rate <= 6e-4 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
