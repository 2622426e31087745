"""The floor that every policy has to beat: clicks anywhere, sometimes types a word of the goal."""

from __future__ import annotations

import random
import re

from holotron.contract.conversation import Conversation
from holotron.contract.policy import Decision
from holotron.contract.step import Click, Step, Write

WRITES = 0.1  # share of steps that type, where the goal quotes something to type

_QUOTED = re.compile(r'"([^"]+)"')


class RandomPolicy:
    """Implements Policy. Uniform over all points of the screenshot; equal seeds give equal steps."""

    def __init__(self, seed: int = 0) -> None:
        self.name = "random"
        self._random = random.Random(seed)

    async def decide(self, conversation: Conversation) -> Decision:
        words = _QUOTED.findall(conversation.goal)
        if words and self._random.random() < WRITES:
            write = Write(content=self._random.choice(words))
            return Decision(Step(thought="I type a word of the goal.", tool_call=write))
        click = Click(element="anything", x=self._random.randint(0, 1000), y=self._random.randint(0, 1000))
        return Decision(Step(thought="I click anywhere.", tool_call=click))

    async def close(self) -> None:
        return
