"""From records (a screenshot with its labels, perhaps an oracle's step) to training examples.

One example is one screenshot with several questions about it: the oracle's next step where there is one, and
grounding questions made from the labels. The vision tower runs once for all of them.
"""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from holotron.contract.contract import Contract
from holotron.contract.conversation import Conversation, Screenshot, Turn
from holotron.contract.step import Click, DoubleClick, DragTo, MoveTo, Scroll, Step
from holotron.model.tokenizer import EOS, IMAGE, token_id

CELL = 8  # pixels a side of a grounding cell
TOKEN = 16  # pixels a side of an image token
CHAR_WIDTH = 4  # pixels across a cell of the character grid
SPREAD = 5.0  # pixels, of the points in made-up histories
CLASSES = 96  # blank, ASCII 33..126, any other character
IGNORE = -100
CLICKING = "I click the target."

Box = tuple[float, float, float, float]
QUESTIONS = {
    "button": ('Click on the "{}" button.', "Click the button {}.", 'Press "{}".'),
    "link": ('Click on the link "{}".', "Click {}.", "Open the link {}."),
    "checkbox": ("Select {}.", "Tick {}.", "Select {} and click Submit."),
    "radio": ("Select {}.", "Choose {}.", "Select {} and click Submit."),
    "tab": ("Click on {}.", "Open {}."),
    "header": ("Expand {}.", "Click on {}."),
    "word": ('Click on the word "{}".', "Find {}.", 'Click "{}".'),
    "text": ('Click on the text "{}".', "Find {}."),
}


@dataclass(slots=True)
class Question:
    """ids of prompt and reply; the reply starts at `reply`. `point` is the index of the x token, -1 if none."""

    ids: list[int]
    reply: int
    point: int
    boxes: list[Box]


@dataclass(slots=True)
class Example:
    png: bytes
    width: int
    height: int
    characters: Tensor  # int64 (H/8, W/4) classes, IGNORE where unknown
    questions: list[Question]


def read_records(paths: list[Path]) -> list[str]:
    """The lines of JSONL files, in the order given; torn last lines are dropped."""
    lines: list[str] = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            lines.extend(line for line in file if line.endswith("\n"))
    return lines


def character_grid(record: dict[str, Any]) -> Tensor:
    """One class for each 8 x 4 pixel cell: the character whose centre lies there. Two in a cell: unknown."""
    rows, columns = -(-record["height"] // TOKEN) * 2, -(-record["width"] // TOKEN) * 4
    grid = torch.zeros(rows, columns, dtype=torch.int64)
    taken = torch.zeros(rows, columns, dtype=torch.bool)
    for x0, y0, x1, y1 in record["ignore"]:
        grid[int(y0 // CELL) : int(-(-y1 // CELL)), int(x0 // CHAR_WIDTH) : int(-(-x1 // CHAR_WIDTH))] = IGNORE
    for char, x, y, _, _ in record["chars"]:
        row, column = int(y // CELL), int(x // CHAR_WIDTH)
        code = ord(char[0]) - 32
        grid[row, column] = IGNORE if taken[row, column] else code if 0 < code < 95 else CLASSES - 1
        taken[row, column] = True
    return grid


def words(record: dict[str, Any]) -> list[tuple[str, Box]]:
    """Neighbouring characters of one line joined into words with their boxes, CSS pixels."""
    found: list[tuple[str, list[float]]] = []
    last: list[Any] | None = None
    for char, x, y, w, h in record["chars"]:
        box = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        if last is not None and abs(y - last[2]) < 0.6 and abs(box[0] - (last[1] + last[3] / 2)) < 1.2:
            text, total = found[-1]
            found[-1] = (text + char, [*total[:2], max(total[2], box[2]), max(total[3], box[3])])
        else:
            found.append((char, box))
        last = [char, x, y, w]
    return [(text, (box[0], box[1], box[2], box[3])) for text, box in found]


def targets(record: dict[str, Any]) -> list[tuple[str, str, list[Box]]]:
    """(role, text, boxes) of everything whose text is unambiguous on this screenshot."""
    named: dict[str, list[tuple[str, Box]]] = {}
    for element in record["elements"]:
        role = {"label": "checkbox"}.get(element["role"], element["role"])
        if element["text"] and role in QUESTIONS and role != "text":
            x0, y0, x1, y1 = element["box"]
            named.setdefault(element["text"], []).append((role, (x0, y0, x1, y1)))
    spoken = words(record)
    count = Counter(text for text, _ in spoken)
    found = []
    for text, uses in named.items():
        roles = {role for role, _ in uses}
        several = len(uses) > 1 and not (roles <= {"checkbox", "radio"} and len(uses) == 2)
        whole = text.replace(" ", "")
        if several or (" " not in text and count[whole] > 1) or len(text) > 24:
            continue
        found.append((uses[0][0], text, [box for _, box in uses]))
    known = set(named)
    for text, box in spoken:
        if count[text] == 1 and text not in known and 2 <= len(text) <= 12 and not any(text in k for k in known):
            found.append(("word", text, [box]))
    return found


class ExampleMaker:
    """Turns a record into an Example, all randomness from the generator given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, contract: Contract, questions: int = 4) -> None:
        self.tokenizer, self.contract, self.questions = tokenizer, contract, questions
        self.image_id = token_id(tokenizer, IMAGE)
        first = token_id(tokenizer, ',"x":0')
        self.x_ids = range(first, first + 1001)

    def __call__(self, line: str, rng: random.Random, steps_only: bool = False) -> Example:
        record = json.loads(line)
        png = base64.b64decode(record["png"])
        shot = Screenshot(png, record["width"], record["height"], record["width"], record["height"])
        questions = []
        if record.get("step"):
            questions.append(self._step_question(record, shot, rng))
        if not steps_only:
            known = targets(record)
            rng.shuffle(known)
            known.sort(key=lambda target: target[0] == "word" and rng.random() < 0.7)
            for role, text, boxes in known[: self.questions - len(questions)]:
                questions.append(self._grounding_question(role, text, boxes, shot, rng))
        return Example(png, shot.width, shot.height, character_grid(record), questions)

    def reading(self, line: str) -> Example:
        """The screenshot and its characters, no questions."""
        record = json.loads(line)
        png = base64.b64decode(record["png"])
        return Example(png, record["width"], record["height"], character_grid(record), [])

    def _step_question(self, record: dict[str, Any], shot: Screenshot, rng: random.Random) -> Question:
        turns = []
        for past in record["history"]:
            step = as_pointed(Step.model_validate(past["step"]), shot, rng)
            turns.append(Turn(shot, past.get("observation", ""), step, past["result"], past["is_error"]))
        turns.append(Turn(shot, record.get("observation", "")))
        step = Step.model_validate(record["step"])
        boxes = [tuple(record["box"])] if record.get("box") else []
        return self._question(Conversation(record["goal"], turns), step, boxes, shot)

    def _grounding_question(
        self, role: str, text: str, boxes: list[Box], shot: Screenshot, rng: random.Random
    ) -> Question:
        goal = rng.choice(QUESTIONS[role]).format(text)
        step = Step(thought=CLICKING, tool_call=Click(element=text, x=0, y=0))
        return self._question(Conversation(goal, [Turn(shot)]), step, boxes, shot)

    def _question(self, conversation: Conversation, step: Step, boxes: list[Any], shot: Screenshot) -> Question:
        call = step.tool_call
        if boxes and hasattr(call, "x"):
            x, y = cell_centre(boxes[0], shot)
            step = step.model_copy(update={"tool_call": call.model_copy(update={"x": x, "y": y})})
        prompt = self.tokenizer.apply_chat_template(
            self.contract.messages(conversation), add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = []
        tokens = -(-shot.width // TOKEN) * -(-shot.height // TOKEN)
        for token in self.tokenizer(prompt, add_special_tokens=False)["input_ids"]:
            ids.extend([token] * tokens if token == self.image_id else [token])
        reply = self.tokenizer(self.contract.dump(step) + EOS, add_special_tokens=False)["input_ids"]
        point = next((len(ids) + i for i, t in enumerate(reply) if t in self.x_ids), -1)
        return Question(ids + reply, len(ids), point if boxes else -1, boxes)


def as_pointed(step: Step, shot: Screenshot, rng: random.Random) -> Step:
    """A past step of the oracle with a point such as the pointer would have chosen: the middle of a cell nearby.

    Otherwise the pilot would remember a page by the oracle's exact coordinates, which its own history never holds.
    """
    call = step.tool_call
    if not isinstance(call, Click | DoubleClick | MoveTo | DragTo | Scroll):
        return step
    x = call.x * shot.width / 1000 + rng.gauss(0, SPREAD)
    y = call.y * shot.height / 1000 + rng.gauss(0, SPREAD)
    x, y = min(max(x, 0.0), shot.width - 1.0), min(max(y, 0.0), shot.height - 1.0)
    column, row = cell_centre((x, y, x, y), shot)
    return step.model_copy(update={"tool_call": call.model_copy(update={"x": column, "y": row})})


def cell_centre(box: Box, shot: Screenshot) -> tuple[int, int]:
    """The centre of the grounding cell under the middle of the box, as integers 0..1000 of the image."""
    x = (int((box[0] + box[2]) / 2 // CELL) + 0.5) * CELL
    y = (int((box[1] + box[3]) / 2 // CELL) + 0.5) * CELL
    return min(1000, round(1000 * x / shot.width)), min(1000, round(1000 * y / shot.height))


def cell_targets(boxes: list[Box], rows: int, columns: int) -> Tensor:
    """Probabilities (rows * columns,) uniform over cells whose centre lies in a box, else the middle's cell."""
    target = torch.zeros(rows, columns)
    ys, xs = (torch.arange(n) * CELL + CELL / 2 for n in (rows, columns))
    for x0, y0, x1, y1 in boxes:
        target[((ys > y0) & (ys < y1))[:, None] & ((xs > x0) & (xs < x1))] = 1
    if not target.any():
        for x0, y0, x1, y1 in boxes:
            row, column = int((y0 + y1) / 2 // CELL), int((x0 + x1) / 2 // CELL)
            target[min(row, rows - 1), min(column, columns - 1)] = 1
    return (target / target.sum()).flatten()


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order


def batches(
    lines: list[str], maker: ExampleMaker, seed: int, start: int, images: int, reading: int = 0
) -> Iterator[list[Example]]:
    """Endless batches from batch `start` on: a function of seed and batch number alone.

    `images` examples with questions (those without any are left out), then `reading` ones that are only read.
    """
    size = images + reading
    per_epoch = len(lines) // size
    if per_epoch == 0:
        raise ValueError(f"{len(lines)} records are fewer than one batch of {size}")
    number, epoch, order = start, -1, []
    while True:
        if number // per_epoch != epoch:
            epoch = number // per_epoch
            order = epoch_order(len(lines), seed, epoch)
        at = number % per_epoch * size
        rng = random.Random(f"{seed}-{number}")
        made = [maker(lines[i], rng) for i in order[at : at + images]]
        read = [maker.reading(lines[i]) for i in order[at + images : at + size]]
        yield [example for example in made if example.questions] + read
        number += 1
