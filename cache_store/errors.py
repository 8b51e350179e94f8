"""Typed errors of the store: each message names the object, what was found, what was wanted and what to do."""

from __future__ import annotations


class CacheError(RuntimeError):
    """Base of every error that the store raises on purpose; jobs print it as one line."""


class CacheMismatch(CacheError):
    """The cache at this place was made with other settings; nothing was written."""


class CacheIncomplete(CacheError):
    """The cache does not account for every input: it cannot be sealed, or holds nothing to read."""


class ShardCorrupt(CacheError):
    """Stored bytes differ from what their record says, after one more try to read them."""


class StorageError(CacheError):
    """The folder or bucket refused an operation for good (missing, forbidden, full, or failing after retries)."""


class AlreadyExists(StorageError):
    """A conditional put found an object of that name: somebody else was first."""


class NotFound(StorageError):
    """There is no object of that name."""


class ObjectEndsEarly(StorageError):
    """An object is shorter than the range that its record names."""


class SampleRejected(CacheError):
    """One sample cannot enter the cache; the build counts it and goes on.

    Attributes: sample_id, reason (what was found and what was wanted).
    """

    def __init__(self, sample_id: str, reason: str) -> None:
        super().__init__(sample_id, reason)  # both as args, so that the error survives pickling between processes
        self.sample_id, self.reason = sample_id, reason

    def __str__(self) -> str:
        return f"sample {self.sample_id!r} rejected: {self.reason}"
