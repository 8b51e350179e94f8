"""Errors a user can act on: each message says what was found, what was wanted and what to do."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """Base of the errors that a job prints as one line, without a traceback."""


class ConfigError(PipelineError):
    """The configuration is wrong; nothing was started."""


class PreflightFailed(PipelineError):
    """A check before the fleet starts did not hold; nothing expensive was started."""


class BuildFailed(PipelineError):
    """A build stopped before every prompt was committed or rejected; the same command continues it."""


class TrainingFailed(PipelineError):
    """Training stopped; the last complete checkpoint is kept and the same command continues from it."""


class EvaluationFailed(PipelineError):
    """An evaluation could not be finished, or found that speculation changes the target's output."""


class ExportFailed(PipelineError):
    """A drafter cannot be exported: what would be served is not what was trained."""
