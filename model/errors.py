"""Errors of the model package: each message says what was found, what was wanted and what to do."""

from __future__ import annotations


class ModelError(RuntimeError):
    """Base of the errors that a user can act on."""


class DrafterConfigError(ModelError):
    """A drafter's shape does not make sense, alone or beside its target."""


class CheckpointError(ModelError):
    """A drafter checkpoint or a target's weights cannot be read, or do not fit the configuration."""


class AnchorError(ModelError):
    """Anchors that are not legal for the sample they were drawn for."""


class DecodingError(ModelError):
    """Decoding was asked for something that this drafter or verifier cannot do."""


class UnsupportedTarget(ModelError):
    """A target whose family or settings the drafter cannot reproduce around embedding, lm_head and final norm."""


class CostTableError(ModelError):
    """A cost table cannot be read or measured, or was asked for a size that it does not hold."""


class CalibrationError(ModelError):
    """A calibration cannot be fitted, read, or applied to this drafter."""
