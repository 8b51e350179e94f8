"""A plane that is still compressed: decompressed when its states are wanted, and only for as long."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import zstandard

from cache_store.errors import CacheError

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame that states the size of its content."""

    data: memoryview
    content_bytes: int
    skip: int = 0
    """Bytes before the plane in the frame's content."""

    @property
    def size(self) -> int:
        """Bytes of the plane."""
        return self.content_bytes - self.skip

    def open(self) -> np.ndarray:
        """The plane, uint8. Raises CacheError for a damaged frame."""
        if not self.content_bytes:
            return np.empty(0, np.uint8)
        try:
            # In one call: its streams, which could fill memory that is kept, take a third longer.
            content = decompressor().decompress(self.data)
        except zstandard.ZstdError as error:
            raise CacheError(f"damaged zstd frame: {error}") from error
        if len(content) != self.content_bytes:
            raise CacheError(f"zstd frame of {len(content)} bytes, wanted {self.content_bytes}")
        return np.frombuffer(content, np.uint8, offset=self.skip)


def frame_of(data: memoryview, content_bytes: int, skip: int = 0) -> Frame | None:
    """A frame whose content has this size; None when the data does not say so."""
    try:
        if zstandard.frame_content_size(data) != content_bytes:
            return None
    except zstandard.ZstdError:
        return None
    return Frame(data, content_bytes, skip)


def small_content(data: memoryview, content_bytes: int) -> bytes | None:
    """The whole content of a short frame; None when it is damaged or of another size."""
    try:
        content: bytes = decompressor().decompress(data, max_output_size=content_bytes)
    except zstandard.ZstdError:
        return None
    return content if len(content) == content_bytes else None


def decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: one serves one call at a time, and is costly to make."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def literal_frames() -> zstandard.ZstdCompressor:
    """A compressor of byte planes: entropy coding with next to no search for matches, which planes do not have.

    Its frames are ordinary ones; against level 1 they are written and read faster at the same size
    (`python -m benchmarks.codecs CACHE`).
    """
    parameters = zstandard.ZstdCompressionParameters(
        window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=1
    )
    return zstandard.ZstdCompressor(compression_params=parameters)
