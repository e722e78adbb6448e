"""Errors of the library: each message says who, what was expected, what was got and what to do."""

__all__ = ["ArgumentError", "CommunicatorError", "DearError", "ScheduleError"]


class DearError(Exception):
    """Base of every error that this library raises on purpose."""


class ArgumentError(DearError, ValueError):
    """A bad argument, found at the earliest call that can know: mostly at construction."""


class ScheduleError(DearError, RuntimeError):
    """Calls in the wrong order, or a use of a value that is still on its way."""


class CommunicatorError(DearError, RuntimeError):
    """A collective failed or timed out; names rank, op, bucket, its first parameters and the step."""
