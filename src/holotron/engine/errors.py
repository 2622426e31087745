"""What can go wrong in the engine, apart from a bad argument (ValueError)."""

from __future__ import annotations


class ModelLoadError(RuntimeError):
    """A checkpoint folder cannot be served. One sentence naming the folder and the file."""


class EngineError(RuntimeError):
    """The engine failed while it served, through no fault of the request's."""


class RequestFailed(EngineError):
    """One request could not go on, such as where no token fits its grammar; the others did."""
