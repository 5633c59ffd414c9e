"""What a training run raises."""

from encore.errors import EncoreError


class CheckpointError(EncoreError):
    """A checkpoint that cannot be written or read, or that another run has made."""


class StoppedError(EncoreError):
    """A training run that was asked to stop before its last step."""
