"""The flags of `vllm serve` for a hybrid model, a machine and a workload, each with its reason; nothing is started."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, field

from holotron.model.config import ConfigError, HolotronConfig
from holotron.model.processing import processor_of
from holotron.model.screens import measure_screens
from holotron.serving.vllm_memory import DTYPES, GIB, Pages, pages, read_model

USED = 0.9  # of a GPU's memory, vLLM's default
OVERHEAD = 4 * GIB  # of each GPU: activations, CUDA graphs, the encoder's cache
SCREEN = (1280, 720)
USERS_PER_SERVER = 64  # one API process decodes and resizes the pictures of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is to be served, where and to whom. `gpus` is per node, 0 means the CPU; `context` in tokens."""

    model: str
    gpus: int = 1
    gpu_memory_gib: float = 79.6  # of an H100 or A100 with "80 GB"
    nodes: int = 1
    tensor_parallel: int | None = None
    users: int = 100
    context: int | None = None
    images: int = 3  # screenshots that stay in a prompt
    dtype: str = "auto"
    cores: int = 1
    memory_gib: float = 8.0  # of the machine, where it has no GPU
    compiler: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("nodes", "users", "images", "cores"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gpus < 0 or self.gpu_memory_gib <= 0:
            raise ValueError(f"{self.gpus} GPUs of {self.gpu_memory_gib} GiB make no machine")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; dtypes: auto, {', '.join(DTYPES)}")
        if not self.gpus and (self.nodes > 1 or self.tensor_parallel not in (None, 1)):
            raise ValueError("several nodes and tensor parallelism need GPUs")


@dataclass(frozen=True, slots=True)
class Flag:
    """A part of the command and why it is there."""

    words: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(slots=True)
class Plan:
    """`residents` sequences of `context` tokens fit into one replica side by side."""

    model: str
    flags: list[Flag]
    command: str = "vllm"
    environment: dict[str, str] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)  # to run before, by hand, on the machines named
    notes: list[str] = field(default_factory=list)
    context: int = 0
    residents: int = 0
    replicas: int = 1
    tensor_parallel: int = 1

    @property
    def arguments(self) -> list[str]:
        """Of `COMMAND serve`."""
        return [self.model, *(word for flag in self.flags for word in flag.words)]

    def explain(self) -> str:
        """For people: commands that can be copied, then the reasons."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [
            " ".join([*settings, self.command, "serve", shlex.quote(self.model)]),
            *(f"  {flag}" for flag in self.flags),
        ]
        command = " \\\n".join(lines)
        width = min(max(len(str(flag)) for flag in self.flags), 48)
        reasons = [f"  {flag!s:<{width}}  {flag.reason}" for flag in self.flags]
        parts = [*self.first, command, "", "why", *reasons, *(["", *self.notes] if self.notes else [])]
        return "\n".join(parts)


def plan(deployment: Deployment) -> Plan:
    """Raises ConfigError where the model cannot be served on that machine, naming what is too large."""
    name, config = read_model(deployment.model)
    gpu = deployment.gpus > 0
    dtype = deployment.dtype if deployment.dtype != "auto" else ("bfloat16" if gpu else "float32")
    cached = pages(config, dtype, prefix_caching=gpu, granule=16 if gpu else 128)
    context = _context(deployment, config)
    made = Plan(name, [], context=context)
    if gpu:
        _place_on_gpus(made, deployment, config, cached)
    else:
        _place_on_cpu(made, deployment, cached)
    waiting = math.ceil(deployment.users / made.replicas)
    running = max(min(waiting, made.residents), 1)
    held = cached.sequence_bytes(context) / 2**20
    made.flags += [
        Flag(("--dtype", dtype), _dtype_reason(dtype, gpu)),
        Flag(("--max-model-len", str(context)), "prompt and reply together; longer requests are refused"),
        Flag(
            ("--max-num-seqs", str(running)),
            f"{waiting} users{' a copy' * (made.replicas > 1)}; {made.residents} sequences of {context} tokens fit "
            f"({held:,.0f} MiB each), so none is pushed out and read again"
            + (f"; {waiting - running} of them wait in turn" if waiting > running else ""),
        ),
        *_step_flags(config, cached, context, gpu),
        *_cache_flags(cached, gpu),
        *_image_flags(deployment, config, made.replicas),
    ]
    if not gpu and not deployment.compiler:
        made.flags.append(Flag(("--enforce-eager",), "there is no C++ compiler here to compile the model with"))
    made.notes.append(
        "--trust-remote-code is not needed: holotron's plugin reads these checkpoints, if holotron is installed in "
        "vLLM's environment (pip install --no-deps holotron)."
    )
    return made


def _context(deployment: Deployment, config: HolotronConfig) -> int:
    most = config.language.max_position_embeddings
    if deployment.context is not None:
        if not 1 <= deployment.context <= most:
            raise ConfigError(f"a context of {deployment.context} tokens is asked for; the model's is {most}")
        return deployment.context
    processor = processor_of(config)
    picture = 0 if processor is None else processor.num_tokens(*SCREEN) + 2
    needed = 1024 * math.ceil((deployment.images * picture + 4096) / 1024)
    return min(max(needed, 16384), most)


def _place_on_gpus(made: Plan, deployment: Deployment, config: HolotronConfig, cached: Pages) -> None:
    """How many GPUs share one copy of the weights, and how many copies there are."""
    total = deployment.gpus * deployment.nodes
    language = config.language

    def splits(parts: int) -> bool:
        kv = language.num_key_value_heads
        whole = language.num_attention_heads % parts == 0 and language.mamba_num_heads % parts == 0
        return total % parts == 0 and whole and (kv % parts == 0 or parts % kv == 0)

    def fit(parts: int) -> int:
        pool = parts * (deployment.gpu_memory_gib * GIB * USED - OVERHEAD) - cached.weights
        return max(int(pool // cached.sequence_bytes(made.context)), 0)

    if deployment.tensor_parallel is not None and not splits(deployment.tensor_parallel):
        raise ConfigError(
            f"tensor_parallel {deployment.tensor_parallel} does not divide {total} GPUs, "
            f"{language.num_attention_heads} attention heads and {language.mamba_num_heads} Mamba heads"
        )
    choices = (
        [deployment.tensor_parallel] if deployment.tensor_parallel else [p for p in range(1, total + 1) if splits(p)]
    )
    near = [parts for parts in choices if parts <= deployment.gpus and fit(parts)] or [p for p in choices if fit(p)]
    if not near:
        raise ConfigError(
            f"{made.model} takes {cached.weights / GIB:.1f} GiB of weights and "
            f"{cached.sequence_bytes(made.context) / GIB:.2f} GiB for one sequence of {made.context} tokens; "
            f"{total} GPUs of {deployment.gpu_memory_gib:g} GiB (of which vLLM uses {USED:.0%}, {OVERHEAD // GIB} GiB "
            "of it to work) do not hold that: take more or larger GPUs, or a shorter context"
        )
    enough = [parts for parts in near if fit(parts) * (total // parts) >= deployment.users]
    # the fewest GPUs a copy that seat everybody, else what seats most
    parts = enough[0] if enough else max(near, key=lambda p: (fit(p) * (total // p), -p))
    made.tensor_parallel, made.replicas, made.residents = parts, total // parts, fit(parts)
    each = (deployment.gpu_memory_gib * USED * parts - OVERHEAD * parts / GIB) - cached.weights / GIB
    made.flags.append(
        Flag(
            ("--tensor-parallel-size", str(parts)),
            f"{cached.weights / GIB:.1f} GiB of weights on {parts} GPU{'s' * (parts > 1)} leave {each:.1f} GiB "
            "for state and keys and values",
        )
    )
    if made.replicas > 1:
        reason = f"{made.replicas} copies of the model; requests are spread over them"
        made.flags.append(Flag(("--data-parallel-size", str(made.replicas)), reason))
    if deployment.nodes > 1:
        _spread(made, deployment)


def _spread(made: Plan, deployment: Deployment) -> None:
    made.first = [
        "# on the first node, then on each of the others, with vLLM and holotron installed on all:",
        f"ray start --head --port 6379 --num-gpus {deployment.gpus}",
        f"ray start --address FIRST_NODE:6379 --num-gpus {deployment.gpus}",
        "# once `ray status` counts all GPUs, on the first node:",
    ]
    across = made.tensor_parallel > deployment.gpus
    reason = "workers on other nodes are started by Ray" + (
        "; a copy reaches over nodes, so every layer waits for the network between them" if across else ""
    )
    made.flags.append(Flag(("--distributed-executor-backend", "ray"), reason))
    if made.replicas > 1:
        made.flags.append(Flag(("--data-parallel-backend", "ray"), "copies on other nodes too"))
        local = deployment.gpus // made.tensor_parallel
        if local:
            made.flags.append(Flag(("--data-parallel-size-local", str(local)), "copies on the first node"))


def _place_on_cpu(made: Plan, deployment: Deployment, cached: Pages) -> None:
    one = cached.sequence_bytes(made.context)
    room = int(deployment.memory_gib * GIB / 2) - cached.weights
    made.residents = max(room, 0) // one
    if not made.residents:
        raise ConfigError(
            f"{made.model} takes {cached.weights / GIB:.1f} GiB of weights and {one / GIB:.2f} GiB for one sequence of "
            f"{made.context} tokens, more than half of this machine's {deployment.memory_gib:.1f} GiB"
        )
    space = math.ceil(min(made.residents, deployment.users) * one / GIB)
    made.environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{deployment.cores - 1}" if deployment.cores > 1 else "0",
        "OMP_NUM_THREADS": str(deployment.cores),
        "VLLM_CPU_KVCACHE_SPACE": str(space),
    }
    made.command = "python -m holotron.serving.vllm_plugin"
    made.notes.append(
        "The vllm command itself does not start where vLLM 0.32 is installed as vllm-cpu; this is the same."
    )
    made.notes.append(
        f"VLLM_CPU_OMP_THREADS_BIND and OMP_NUM_THREADS: by itself vLLM leaves one core idle. VLLM_CPU_KVCACHE_SPACE: "
        f"GiB for {min(made.residents, deployment.users)} sequences."
    )


def _dtype_reason(dtype: str, gpu: bool) -> str:
    if dtype == "float32":
        return "as exact as it gets" if gpu else "16-bit products are many times slower on CPUs without AMX or AVX-512"
    return "weights, activations, keys and values in 16 bits; the recurrent state stays in 32"


def _step_flags(config: HolotronConfig, cached: Pages, context: int, gpu: bool) -> list[Flag]:
    largest = max((screen.tokens for screen in measure_screens(config) if screen.tokens < context), default=0)
    least = max(8192 if gpu else 2048, largest + 2, cached.block_tokens or 0)
    tokens = 1024 * math.ceil(least / 1024)
    reason = "tokens of one step"
    if largest:
        reason += f": the largest screenshot ({largest}) whole"
    if gpu and cached.block_tokens:
        reason += f"; a state is kept where a step ends at a multiple of {cached.block_tokens}"
    return [Flag(("--max-num-batched-tokens", str(tokens)), reason)]


def _cache_flags(cached: Pages, gpu: bool) -> list[Flag]:
    state = Flag(
        ("--mamba-ssm-cache-dtype", "float32"), "rounding errors of the recurrent state add up over thousands of tokens"
    )
    if not gpu:
        reason = "vLLM 0.32 on CPUs dies of the first prompt longer than a block with it: every turn is read anew"
        return [state, Flag(("--no-enable-prefix-caching",), reason)]
    reason = (
        f"a turn starts from the state at a multiple of {cached.block_tokens} tokens that an earlier one kept: up to "
        "that many are read again, shorter prompts are never found, and a sequence keeps two states for it. Watch "
        "vllm:prefix_cache_hits: hits have gone missing with a new image in each turn (vllm#43587) and with this "
        "architecture (vllm#54505)"
    )
    return [state, Flag(("--enable-prefix-caching",), reason)]


def _image_flags(deployment: Deployment, config: HolotronConfig, replicas: int) -> list[Flag]:
    if config.vision_config is None:
        return []
    limits = json.dumps({"image": deployment.images, "video": 0, "audio": 0})
    flags = [
        Flag(("--limit-mm-per-prompt", limits), "room for so many screenshots, and none for video or sound"),
        Flag(("--video-pruning-rate", "0"), "no image tokens are dropped"),
    ]
    servers = math.ceil(deployment.users / USERS_PER_SERVER)
    if servers == 1 and replicas == 1:
        reason = "screenshots sent again with each turn are prepared once and reach the workers by shared memory"
        return [*flags, Flag(("--mm-processor-cache-type", "shm"), reason)]
    cache = Flag(("--mm-processor-cache-gb", "4"), "screenshots sent again with each turn are prepared once a process")
    if replicas > 1:
        return [*flags, cache]  # there is an API process for each copy already
    reason = (
        f"one process prepares the pictures of about {USERS_PER_SERVER} users; the shared-memory cache allows but one"
    )
    return [*flags, cache, Flag(("--api-server-count", str(servers)), reason)]
