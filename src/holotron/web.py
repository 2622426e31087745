"""`holotron run`: a person's own task on a page of their choice."""

from __future__ import annotations

import asyncio
import re
from datetime import date
from pathlib import Path

from rich.console import Console

from holotron.agent.fleet import Event
from holotron.agent.loop import Limits
from holotron.agent.records import INFRA
from holotron.agent.trajectory import episode_folder, read_result
from holotron.computer.computer import ComputerError
from holotron.contract.conversation import Settings
from holotron.evaluation.episodes import run_folder, run_web
from holotron.evaluation.policies import choose_policy
from holotron.report.html import write_report

SIZE = (1280, 720)


def read_viewport(text: str, default: tuple[int, int] | None) -> tuple[int, int]:
    """WIDTHxHEIGHT in CSS pixels. Raises ValueError."""
    if not text:
        return default or SIZE
    found = re.fullmatch(r"(\d{2,4})x(\d{2,4})", text)
    if not found:
        raise ValueError(f"--viewport is {text!r}; write it as 1280x720")
    return int(found[1]), int(found[2])


def drive(
    task: str,
    url: str,
    model: str,
    *,
    served_name: str | None,
    contract: str | None,
    prompt_file: Path | None,
    viewport: str,
    max_steps: int,
    max_seconds: float,
    hosts: list[str] | None,
    headless: bool,
    out: Path | None,
    resume: bool,
    console: Console,
    as_json: bool,
) -> None:
    """Raises ComputerError, PolicyError, ValueError with what to do; a failed model only says so."""
    chosen = choose_policy(model, contract, prompt_file=prompt_file, served_name=served_name, workers=1)
    folder = out or run_folder("web")

    def show(event: Event) -> None:
        if event.kind == "step" and event.record is not None:
            step = event.record.step
            if step is None:
                console.print(f"  unusable reply: {event.record.outcome}", markup=False, highlight=False)
            else:
                call = step.tool_call.model_dump(mode="json")
                name = call.pop("tool_name")
                said = ", ".join(f"{k}={v!r}" for k, v in call.items())
                console.print(f"  {step.thought}  {name}({said}) -> {event.record.outcome}", markup=False)
        elif event.kind in ("retry", "stopped"):
            console.print(event.text, markup=False, soft_wrap=True)

    summary = asyncio.run(
        run_web(
            chosen, task, url, folder,
            size=read_viewport(viewport, chosen.viewport),
            limits=Limits(max_steps=max_steps, max_seconds=max_seconds, answer_at_limit=True),
            settings=Settings(date=date.today().isoformat()),
            headless=headless, allowed_hosts=hosts, resume=resume, on_event=show,
        )
    )  # fmt: skip
    result = read_result(episode_folder(folder, "web", 0))
    console.print(f"report: {write_report(folder)}", soft_wrap=True, highlight=False)
    if result is not None and result.status == INFRA:
        raise ComputerError(result.error or "the episode failed outside the model")
    if result is not None:
        console.print(f"{result.status} after {result.steps} steps", highlight=False)
        if result.answer is not None:
            console.print(result.answer, markup=False, highlight=False)
    if as_json:
        console.file.flush()
        print(summary.model_dump_json())
