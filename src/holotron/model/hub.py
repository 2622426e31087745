"""Where a checkpoint's files are: a folder as it is, or a hub id by way of huggingface_hub's cache."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from holotron.model.config import ConfigError

logger = logging.getLogger(__name__)

# Everything that belongs to a checkpoint but its weights. Python files are never asked for.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def resolve(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: `name` itself, or the local copy of a hub id, downloaded if it must be.

    `revision` pins a hub id to a commit; without one the newest is taken and its hash is logged. With
    HF_HUB_OFFLINE=1 only what is already in the cache is used. `weights` False leaves the tensors out.
    Raises ConfigError.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ConfigError(f"{name} is a file; a checkpoint is the folder that holds config.json and *.safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or str(name).startswith((".", "/")):
        raise ConfigError(f"{name} is not a folder with config.json and weights, nor a hub id (organisation/name)")
    return _download(str(name), revision, (*SMALL_FILES, "*.safetensors") if weights else SMALL_FILES)


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: accept its licence on its page, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"there is no {name} on the hub, or it is private and HF_TOKEN is not set") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"{name} is not in the local cache and the hub cannot be reached (HF_HUB_OFFLINE set, or no network): "
            "download it where there is one, or give a folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{name} could not be downloaded: {error}") from error
    if revision is None:
        logger.warning("%s: no revision given, using %s; pass it as the revision to pin it", name, folder.name)
    return folder


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """One JSON object of a checkpoint folder; `Infinity` is accepted. Raises ConfigError."""
    try:
        values = json.loads((folder / name).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {name}; the checkpoint is incomplete") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/{name} is unreadable: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{folder}/{name} is unreadable: not a JSON object")
    return values
