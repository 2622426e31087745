"""A run folder made by real episodes: MiniWoB++ in Chromium, an oracle that slips now and then."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from holotron.agent.fleet import Job, run_fleet
from holotron.agent.summary import RunSummary
from holotron.computer.browser import Browser
from holotron.contract.contract import get_contract
from holotron.contract.conversation import Conversation
from holotron.contract.policy import Decision
from holotron.contract.step import Click
from holotron.tasks.miniwob import MiniWobTask, viewport
from holotron.tasks.oracles import OraclePolicy


@dataclass
class ClumsyOracle:
    """Knows the one task that is being played; a share of its clicks lands somewhere else."""

    slips: float
    name: str = "clumsy oracle"
    oracle: OraclePolicy | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    async def decide(self, conversation: Conversation) -> Decision:
        assert self.oracle is not None
        decision = await self.oracle.decide(conversation)
        call = decision.step.tool_call
        if isinstance(call, Click) and self.rng.random() < self.slips:
            astray = call.model_copy(update={"x": self.rng.randrange(1001), "y": self.rng.randrange(1001)})
            return replace(decision, step=decision.step.model_copy(update={"tool_call": astray}))
        return decision

    async def close(self) -> None:
        return


async def play(run_dir: Path, tasks: list[str], seeds: int, slips: float = 0.3) -> RunSummary:
    policy = ClumsyOracle(slips)
    async with await Browser.launch() as browser:

        async def make_task(name: str) -> MiniWobTask:
            task = MiniWobTask(await browser.new_computer(*viewport()), name)
            policy.oracle = OraclePolicy(task)
            return task

        jobs = [Job(task, seed) for task in tasks for seed in range(seeds)]
        contract = get_contract("holotron3")
        return await run_fleet(jobs, make_task, policy, contract, 1, run_dir, browser=f"Chromium {browser.version}")
