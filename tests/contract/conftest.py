"""Property tests count examples, not milliseconds: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
