"""How long an episode may take, and how long anything in it may hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_steps` counts every decision, also a forced answer. `max_seconds` is looked at before each one.

    `decide_seconds` and `act_seconds` bound a single decision and a single action, reset or screenshot: what
    takes longer hangs, and that is infrastructure. The first leaves room for a policy's own retries.
    """

    max_steps: int = 10
    max_seconds: float = 120.0
    answer_at_limit: bool = False  # for tasks that end by an answer: the last decision has to be one
    infra_retries: int = 2
    contract_failures: int = 3  # this many unusable outputs in a row end the episode
    decide_seconds: float = 400.0
    act_seconds: float = 90.0


class HangError(RuntimeError):
    """A browser or policy call gave no result in the time allowed."""


async def bounded(awaitable: Awaitable[T], seconds: float, what: str) -> T:
    """Await for at most `seconds`; raises HangError naming `what`."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError as error:
        raise HangError(f"{what} gave no result within {seconds:g} s") from error
