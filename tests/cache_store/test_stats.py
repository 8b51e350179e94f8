from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cache_store import codec
from cache_store.errors import CacheError
from cache_store.reader import CacheReader
from cache_store.stats import cache_stats, layer_stats
from cache_store.stats_plot import save_png
from cache_store.storage import open_storage
from tests.cache_store.samples import build_cache, make_spec


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> CacheReader:
    storage = open_storage(str(tmp_path_factory.mktemp("stats") / "cache"))
    build_cache(storage, make_spec(), 9)
    return CacheReader(storage)


def test_lengths_come_from_the_index_and_values_from_some_samples(reader: CacheReader) -> None:
    seen: list[tuple[int, int]] = []
    stats = cache_stats(reader, read_samples=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sum(item.samples for item in stats.lengths) == sum(item.samples for item in stats.supervised_lengths) == 9
    assert stats.supervised_lengths[-1].high == reader.supervised_tokens.max()
    assert stats.domains == {"math": 9}
    assert [layer.layer for layer in stats.layers] == ["0", "2", "last"]
    assert stats.layers[0].rows > stats.layers[2].rows, "only stored rows of the last hidden state count"
    assert cache_stats(reader, read_samples=0).layers == ()
    assert cache_stats(reader, read_samples=99).read_samples == 9


def test_norms_and_massive_activations_are_found() -> None:
    values = np.full((50, 8), 2.0, dtype=np.float32)
    values[0, 3] = 20480.0
    values[10, 5] = -4096.0
    values[20, 5] = 2560.0
    found = layer_stats("7", codec.to_bits(values), np.arange(50) == 0)
    assert (found.rows, found.max_abs, found.max_abs_after_first) == (50, 20480.0, 4096.0)
    assert (found.massive, found.massive_rows, found.massive_channels) == (3, 3, (5, 3))
    assert found.norm_median == pytest.approx(np.sqrt(8 * 4.0))
    assert found.norm_max == pytest.approx(20480.0, rel=1e-3)
    assert found.rms == pytest.approx(np.sqrt((values.astype(float) ** 2).mean()))


def test_picture(reader: CacheReader, tmp_path: Path) -> None:
    for samples in (3, 0):
        path = tmp_path / f"{samples}.png"
        save_png(cache_stats(reader, read_samples=samples), path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(CacheError, match="cannot write the picture"):
        save_png(cache_stats(reader, read_samples=0), tmp_path / "no" / "folder.png")
