"""The one family of errors distcse raises for input it cannot accept.

Every message names the place (file and line, row, or recipe key), what was found there, and what to write instead.
Anything else that escapes is a defect of distcse itself.
"""

from __future__ import annotations


class DistcseError(Exception):
    """Base of every error that a user can cause and mend."""


class RecipeError(DistcseError):
    """A recipe with an unknown key, a wrong type, a value out of range, or an impossible combination."""


class CorpusError(DistcseError):
    """Text that cannot be read: a missing file or column, a bad byte, an empty corpus."""


class EncoderError(DistcseError):
    """A model folder that cannot be loaded as a sentence encoder, or saved in a form every reader agrees on."""


class TeacherError(DistcseError):
    """A teacher that cannot serve: broken table storage, non-finite vectors, a lost server."""


class EvaluationError(DistcseError):
    """Evaluation data that is missing or malformed."""


class RunError(DistcseError):
    """A run that cannot start, resume or go on: wrong directory, too small a cluster, lost workers."""


class StoppedEarlyError(RunError):
    """A run that was asked to stop while it waited for room or for another run. Commands exit with 130."""


class StorageError(RunError):
    """Storage that is full, read-only or failing. What was being written is dropped; what was there before is whole."""


class DivergedError(RunError):
    """A loss, score or weight that is not finite: the same values will not do better a second time."""
