"""`cache_store stats --png`: the distributions as one picture. The only matplotlib of the store, imported when used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache_store.errors import CacheError
from cache_store.inspection import LengthBin
from cache_store.stats import CacheStats


def save_png(stats: CacheStats, path: Path) -> None:
    """Draw lengths, row norms and largest values per layer. Raises CacheError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CacheError("--png needs the package `matplotlib` (pip install matplotlib)") from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{stats.url}: {stats.samples:,} samples, {stats.tokens:,} tokens")
    _bars(axes[0, 0], stats.lengths, "tokens per sample")
    _bars(axes[0, 1], stats.supervised_lengths, "supervised tokens per sample")
    names = [layer.layer for layer in stats.layers]
    norms, largest = axes[1]
    for label, values in (
        ("median", [layer.norm_median for layer in stats.layers]),
        ("99 %", [layer.norm_p99 for layer in stats.layers]),
        ("largest", [layer.norm_max for layer in stats.layers]),
    ):
        norms.plot(names, values, marker="o", label=label)
    norms.set(title=f"norm of a token's state ({stats.read_samples} samples)", xlabel="layer")
    for label, values in (
        ("any token", [layer.max_abs for layer in stats.layers]),
        ("after the first token", [layer.max_abs_after_first for layer in stats.layers]),
        ("RMS", [layer.rms for layer in stats.layers]),
    ):
        largest.plot(names, values, marker="o", label=label)
    largest.set(title="largest magnitude of a value", xlabel="layer")
    for axis in (norms, largest):
        if names:
            axis.set_yscale("log")
            axis.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise CacheError(f"{path}: cannot write the picture: {error.strerror or error}") from error


def _bars(axis: Any, bins: tuple[LengthBin, ...], title: str) -> None:
    axis.bar(
        [item.low for item in bins],
        [item.samples for item in bins],
        width=[item.high - item.low + 1 for item in bins],
        align="edge",
        edgecolor="white",
    )
    axis.set(title=title, ylabel="samples")
