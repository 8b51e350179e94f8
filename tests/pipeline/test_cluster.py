import logging

import pytest

from pipeline.cluster import quiet_start


def test_a_quiet_start_hides_notices_and_gives_logging_back(caplog):
    log = logging.getLogger("some.library")
    with caplog.at_level(logging.INFO):
        with quiet_start():
            log.info("connecting once more")
            log.error("but this is wrong")
        log.info("afterwards")
    assert [record.message for record in caplog.records] == ["but this is wrong", "afterwards"]


def test_a_failing_start_gives_logging_back():
    with pytest.raises(RuntimeError), quiet_start():
        raise RuntimeError
    assert logging.root.manager.disable == logging.NOTSET
