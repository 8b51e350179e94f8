from __future__ import annotations

import pytest

from tests.cache_store import samples


@pytest.fixture(params=["parquet", "tar"])
def both_formats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once per container; `make_spec` uses it unless a test names a format itself."""
    monkeypatch.setitem(samples.DEFAULTS, "format", request.param)
    return request.param
