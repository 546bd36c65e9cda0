"""Errors that mean "the input cannot be used", told in one line: the value, what was expected, what
to do. The command line prints their message and exits with 2.
"""


class CheckpointError(ValueError):
    """A model's files are missing, damaged, or not of a kind that jaxkv knows."""


class DownloadError(RuntimeError):
    """A model could not be fetched."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
