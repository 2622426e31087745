"""Task lists as a person writes them, and models as a person names them."""

from __future__ import annotations

import pytest

from holotron.contract.policy import PolicyError
from holotron.evaluation.episodes import read_tasks
from holotron.evaluation.policies import choose_policy
from holotron.tasks.miniwob import EASY20, TASKS, UnknownTask


def test_sets_and_names_may_be_mixed_and_come_once() -> None:
    assert read_tasks("click-test, easy20") == ["click-test", *[name for name in EASY20 if name != "click-test"]]
    assert read_tasks("all") == list(TASKS)


@pytest.mark.parametrize("text", ["", " , ", "click-tst", "easy21"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(UnknownTask):
        read_tasks(text)


def test_models_by_name() -> None:
    assert choose_policy("random").name == "random"
    assert choose_policy("http://127.0.0.1:1/v1").check is not None
    with pytest.raises(PolicyError, match="neither a checkpoint folder nor"):
        choose_policy("nowhere")
