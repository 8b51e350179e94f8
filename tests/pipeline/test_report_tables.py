"""Tables show the numbers that they were given."""

from __future__ import annotations

from model.decoding.calibration import Bin, Calibration, PositionQuality, Quality
from pipeline.report import EvaluationReport
from pipeline.report_tables import calibration_table, report_tables
from tests.pipeline.test_report import make_report


def cell(report: EvaluationReport, table: int, keys: tuple[str, str], column: str) -> str:
    """The cell of the row whose first two cells are `keys`."""
    found = report_tables(report)[table]
    [line] = [line for line in found.rows if line[:2] == keys]
    return line[found.columns.index(column)]


def test_domain_table_has_every_domain_then_all() -> None:
    report = make_report()
    assert [row[0] for row in report_tables(report)[0].rows[::2]] == ["chat", "math", "all"]
    assert cell(report, 0, ("math", "0"), "τ trained").startswith("3.00")
    assert cell(report, 0, ("chat", "0"), "τ trained") == "1.00"  # one prompt: no interval
    assert cell(report, 0, ("all", "0"), "τ trained").startswith("2.60 [")
    assert cell(report, 0, ("all", "0"), "τ untrained").startswith("1.00 [")
    assert cell(report, 0, ("all", "1"), "rounds") == "4"
    assert cell(report, 0, ("chat", "1"), "τ trained") == "-"  # not measured is not zero


def test_position_table_keeps_conditional_and_survival_apart() -> None:
    report = make_report()
    # Every round that reached position 2 accepted it, but one of five did not reach it.
    assert cell(report, 1, ("0", "2"), "conditional").startswith("1.00")
    assert cell(report, 1, ("0", "2"), "survival") == "0.80"
    assert cell(report, 1, ("0", "2"), "rounds") == "4"
    assert cell(report, 1, ("0", "1"), "untrained: conditional") == "0.00"
    assert cell(report, 1, ("1", "3"), "conditional") == "-"


def test_comparison_shows_times_in_milliseconds_and_the_speed_up() -> None:
    report = make_report()
    rows = {(row[0], row[1]): row for row in report_tables(report)[2].rows}
    assert rows["trained", "0"][-4:] == ("20.0", "5.0", "25.0", "1.73")
    assert rows["untrained", "0"][-4:] == ("-",) * 4
    assert next(iter(rows)) == ("untrained", "0")


def test_verify_rate_counts_verified_drafts() -> None:
    rows = {(row[0], row[1]): row for row in report_tables(make_report())[2].rows}
    # Four rounds accepted 2 of 3 verified drafts, one accepted none of 3.
    assert rows["trained", "0"][3] == "53 %"
    assert rows["untrained", "0"][3] == "0 %"


def test_breakdowns_by_language_and_context_length() -> None:
    titles = [table.title for table in report_tables(make_report())]
    assert titles[3:5] == ["Accepted length by language", "Accepted length by context length"]
    assert cell(make_report(), 3, ("de", "0"), "τ trained") == "1.00"
    assert cell(make_report(), 4, ("under 128", "0"), "rounds") == "4"
    assert cell(make_report(), 4, ("128-255", "0"), "τ trained") == "1.00"


def test_threshold_sweep() -> None:
    assert cell(make_report(), 5, ("0", "0"), "verified") == "3.00"
    assert cell(make_report(), 5, ("0", "0.5"), "verified") == "2.00"


def quality(ece: float) -> Quality:
    return Quality(count=1200, ece=ece, brier=0.2, auroc=0.75, bins=(Bin(0.0, 1.0, 1200, 0.5, 0.5),))


def make_calibration() -> Calibration:
    unreached = PositionQuality(position=2, conditional=None, prefix=quality(0.25))
    before = (PositionQuality(position=1, conditional=quality(0.5), prefix=quality(0.125)), unreached)
    after = (PositionQuality(position=1, conditional=quality(0.0625), prefix=quality(0.001)), unreached)
    return Calibration(temperatures=(1.5, 1.0), fitted_on={}, before=before, after=after)


def test_calibration_shows_before_and_after() -> None:
    first, second = calibration_table(make_calibration()).rows
    assert first == ("1", "1.50", "1,200", "0.125 → 0.001", "0.200 → 0.200", "0.500 → 0.062", "0.75")
    assert second[-2:] == ("-", "-")
