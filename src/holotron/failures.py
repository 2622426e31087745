"""From an exception to the line a person reads and the exit code a script sees."""

from __future__ import annotations

import errno
import os
import traceback
from types import TracebackType

DEBUG = "HOLOTRON_DEBUG"
INTERRUPTED = 130


def explain(failure: BaseException) -> tuple[str, int]:
    """The text for standard error and the exit code.

    An expected failure is one line. Anything else is a defect of ours and keeps its traceback, as every
    failure does under HOLOTRON_DEBUG=1.
    """
    cause = _first(failure)
    if isinstance(cause, KeyboardInterrupt):
        text, code = "interrupted", INTERRUPTED
    elif isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        where = f" while writing {cause.filename}" if cause.filename else ""
        text, code = f"the disk is full{where}; free some space and type the command again", 1
    elif isinstance(cause, ModuleNotFoundError) and not (cause.name or "").startswith("holotron"):
        text, code = f"{cause.name} is not installed; `holotron doctor` names the command that adds it", 1
    elif isinstance(cause, OSError) and cause.strerror and cause.filename:
        text, code = f"{cause.filename}: {cause.strerror}", 1
    elif _is_expected(cause):
        text, code = str(cause) or type(cause).__name__, 1
    else:
        text = f"unexpected {type(cause).__name__}: {cause} (a defect of holotron; please report it)"
        return f"{_trace(failure)}holotron: {text}", 1
    return (_trace(failure) if os.environ.get(DEBUG) else "") + f"holotron: {text}", code


def _first(failure: BaseException) -> BaseException:
    """Workers run in task groups, which wrap what went wrong; Ctrl-C outranks the failures it set off."""
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    leaves = [_first(inner) for inner in failure.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, KeyboardInterrupt)), leaves[0])


def _is_expected(failure: BaseException) -> bool:
    """Failures of the outside world, errors of a class of ours, and ValueErrors that our own code worded."""
    if isinstance(failure, OSError) or type(failure).__module__.startswith("holotron."):
        return True
    return isinstance(failure, ValueError) and _raised_in(failure.__traceback__).startswith("holotron.")


def _raised_in(trace: TracebackType | None) -> str:
    module = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module


def _trace(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure))
