"""An OpenAI-compatible HTTP server over the engine: `create_app` here, `holotron.serving.serve` runs it."""

from holotron.serving.server.app import create_app
from holotron.serving.server.settings import Limits, ServerSettings, SettingsError

__all__ = ["Limits", "ServerSettings", "SettingsError", "create_app"]
