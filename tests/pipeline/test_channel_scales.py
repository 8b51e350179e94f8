"""The choice of the calibration set. The measurement on a real cluster is in test_build.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_store.calibration import CALIBRATION_SAMPLES
from pipeline.channel_scales import calibration_set


@given(st.sets(st.text(max_size=5), max_size=200), st.randoms())
def test_the_set_depends_on_the_ids_alone(ids: set[str], random: object) -> None:
    names = sorted(ids)
    random.shuffle(names)  # type: ignore[attr-defined]
    chosen = calibration_set(names)
    assert chosen == calibration_set(sorted(ids))
    assert len(chosen) == min(len(ids), CALIBRATION_SAMPLES)
    assert set(chosen) <= ids


def test_a_further_id_moves_one_at_most() -> None:
    names = [f"p{number}" for number in range(500)]
    before, after = set(calibration_set(names)), set(calibration_set([*names, "new"]))
    assert len(before - after) <= 1
    assert before != set(names[:CALIBRATION_SAMPLES]), "not the first inputs, which are often of one source"
