"""From what a person writes after `--model` to a policy, the contract it speaks and the screen it wants."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holotron.agent.loop import PolicyFor
from holotron.contract.contract import Contract, get_contract
from holotron.contract.policy import Policy, PolicyError
from holotron.tasks.miniwob import MiniWobTask
from holotron.tasks.oracles import OraclePolicy
from holotron.tasks.random_policy import RandomPolicy


@dataclass(slots=True)
class Chosen:
    """`policy` is one for all tasks, or makes one for a task. `viewport` is CSS pixels, None where any will do."""

    policy: Policy | PolicyFor
    contract: Contract
    name: str
    viewport: tuple[int, int] | None = None
    close: Callable[[], Awaitable[None]] | None = None
    check: Callable[[], Awaitable[str]] | None = None  # asks an endpoint whether it is there, before anything starts


def oracle(task: MiniWobTask) -> Policy:
    return OraclePolicy(task)


def choose_policy(
    model: str,
    contract: str | None = None,
    images_kept: int | None = None,
    prompt_file: Path | None = None,
    served_name: str | None = None,
    workers: int = 4,
    tokens_only: bool = False,
) -> Chosen:
    """`model` is a checkpoint folder, the URL of an endpoint, or `oracle` or `random`.

    With `tokens_only` a checkpoint with a grounding head spells coordinates as plain tokens instead, as any other
    engine would have it do. Raises PolicyError for a folder that cannot be served.
    """
    from holotron.serving.http_policy import HttpPolicy, is_endpoint

    if model in ("oracle", "random"):
        made: Any = oracle if model == "oracle" else RandomPolicy(0)
        return Chosen(made, get_contract(contract or "holotron3"), model)
    if is_endpoint(model):
        spoken = get_contract(contract or "holotron3", images_kept=images_kept, prompt_file=prompt_file)
        http = HttpPolicy(model, served_name, spoken)
        return Chosen(http, spoken, model, None, http.close, http.check)
    if not Path(model).is_dir():
        raise PolicyError(f"{model} is neither a checkpoint folder nor an http(s) URL, nor one of: oracle, random")
    from holotron.engine import SamplingParams
    from holotron.serving.policy import AgentSettings, load_policy

    settings = AgentSettings.read(Path(model))
    sampling = SamplingParams(max_tokens=settings.max_tokens, use_grounding_head=not tokens_only)
    engine = load_policy(model, contract, images_kept, max_batch=max(workers, 1), sampling=sampling)
    return Chosen(engine, engine.contract, str(model), engine.viewport, engine.close)
