"""The learning rate: a pure function, so a resumed run needs only its step."""

from __future__ import annotations

import math


def lr_at(step: int, *, total: int, peak: float, warmup_ratio: float) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up to `peak`, then a cosine to 0 at step `total`.

    The warm-up takes ceil(warmup_ratio · total) steps; its first step already moves.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return peak * ((step + 1) / warmup)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
