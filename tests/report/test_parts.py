"""The parts of a report that need no page: words, geometry, scores, speed, images."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from math import hypot
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from holotron.agent.records import Status
from holotron.agent.trajectory import write_run
from holotron.contract.step import Step, ToolCall
from holotron.report.episodes import VERDICTS, read_recorded
from holotron.report.frames import LARGE_BUDGET, WIDTHS_AND_BYTES, read_frame, width_limit
from holotron.report.html import ranges_text
from holotron.report.marker import marker_of
from holotron.report.plots import Bar, latency_histogram, memory_by_step, quantile, success_bars
from holotron.report.readable import bytes_text, seconds_text, tool_call_text
from holotron.report.success import success_of
from holotron.report.throughput import throughput_of
from tests.report.run_folder import page, run_info, small_run, write_episode


def test_every_tool_has_words_of_its_own() -> None:
    names = {get_args(tool.model_fields["tool_name"].annotation)[0] for tool in get_args(get_args(ToolCall)[0])}
    assert len(names) == 17
    for name in names:
        assert "{" not in tool_call_text({"tool_name": name}), name  # an unknown tool is shown as JSON


def test_tool_calls_read_well() -> None:
    def text(**call: object) -> str:
        step = Step.model_validate({"thought": "", "tool_call": call})
        return tool_call_text(step.tool_call.model_dump())

    assert text(tool_name="click", element="Ok", x=5, y=7) == "click “Ok” at (5, 7)"
    assert text(tool_name="click", element="Ok", x=5, y=7, button="right").endswith("with the right button")
    assert text(tool_name="write", content="a\nb", press_enter=True) == "write “a⏎b” then Enter"
    assert text(tool_name="hotkey", keys=["ctrl", "a"], repeat_count=2) == "press ctrl+a 2 times"
    assert tool_call_text({"tool_name": "fly", "to": "Rome"}) == 'fly {"to": "Rome"}'
    assert tool_call_text({"tool_name": "click", "element": "Ok", "x": 5, "y": 7}, places=False) == "click “Ok”"


def test_quantities_read_well() -> None:
    assert [bytes_text(n) for n in (None, 0, 1023, 1536, 5 << 20)] == [
        "–",
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
    ]
    assert [seconds_text(s) for s in (0.012, 1.25, 185)] == ["12 ms", "1.25 s", "3 min 05 s"]
    assert ranges_text([0, 1, 2, 7, 9, 10]) == "0–2, 7, 9–10"


@given(st.tuples(st.floats(0, 160), st.floats(0, 160)), st.tuples(st.floats(0, 160), st.floats(0, 160)))
def test_drag_arrow_runs_from_cursor_to_point(point: tuple[float, float], cursor: tuple[float, float]) -> None:
    marker = marker_of({"tool_name": "drag_to"}, point, cursor, 160)
    assert marker is not None and marker.point == point
    if marker.arrow is None:
        assert hypot(point[0] - cursor[0], point[1] - cursor[1]) < marker.radius
        return
    assert marker.arrow == (cursor, point) and marker.barbs is not None
    for barb in marker.barbs:  # behind the tip, seen from the tail
        assert (
            hypot(barb[0] - cursor[0], barb[1] - cursor[1])
            < hypot(point[0] - cursor[0], point[1] - cursor[1]) + marker.radius
        )
        assert hypot(barb[0] - point[0], barb[1] - point[1]) == pytest.approx(marker.radius * 1.36**0.5)


def test_only_calls_with_a_point_are_marked() -> None:
    assert marker_of({"tool_name": "write"}, None, (3, 3), 160) is None
    scroll = marker_of({"tool_name": "scroll", "direction": "up"}, (80, 80), None, 160)
    assert scroll is not None and scroll.arrow is not None
    assert scroll.arrow[1][0] == 80 and scroll.arrow[1][1] < 80


def test_scores_leave_out_what_says_nothing_about_the_model(tmp_path: Path) -> None:
    _, recorded, problems = read_recorded(small_run(tmp_path))
    assert not problems
    assert {(one.task, one.seed): one.outcome for one in recorded} == {
        ("click-test", 0): "success",
        ("click-test", 1): "failure",
        ("click-test", 2): "infrastructure",
        ("drag-box", 0): "failure",
        ("enter-text", 0): "success",
        ("enter-text", 1): "unfinished",
        ("web", 0): "unchecked",
    }
    success = success_of(recorded)
    row = next(row for row in success.rows if row.task == "click-test")
    assert (row.n, row.score.successes, row.score.infra_errors, row.steps) == (2, 1, 1, "3")
    assert (success.total.n, success.total.unfinished, success.total.unchecked) == (4, 1, 1)
    assert success.mean == "50 %" and success.scored_tasks == 3
    assert [bar.label for bar in success.bars()] == ["enter-text", "click-test", "drag-box"]


@pytest.mark.parametrize("status", get_args(Status))
def test_every_status_has_a_verdict(tmp_path: Path, status: Status) -> None:
    write_run(tmp_path, run_info([("a", 0)]))
    write_episode(tmp_path, "a", 0, status=status)
    (one,) = read_recorded(tmp_path)[1]
    assert one.outcome in VERDICTS
    assert (one.outcome == "success") == (status == "success")
    assert (one.outcome == "infrastructure") == (status == "infra_error")


def test_speed_does_not_count_the_gap_before_a_resumption(tmp_path: Path) -> None:
    info = run_info([("a", 0), ("a", 1)])
    write_run(tmp_path, info)
    write_episode(tmp_path, "a", 0, steps=4)  # seconds 2 to 6 of the run
    write_episode(tmp_path, "a", 1, steps=4, ended_at=1_780_001_006.0)  # a thousand seconds later
    first, second = (one.episode for one in read_recorded(tmp_path)[1])
    late = tuple(step.model_copy(update={"at": step.at + 1000}) for step in second.steps)
    episodes = [first, replace(second, steps=late)]
    found = throughput_of(info, episodes, None)
    assert found is not None
    assert found.speed.seconds == pytest.approx(2 * 4.28, abs=0.01)  # from the first screenshot, 0.28 s before
    assert found.speed.actions == 8
    assert found.speed.first_action_s == pytest.approx(2.0)
    assert found.state_first == found.state_last == 98304
    assert (found.kv_first, found.kv_last) == (20480, 4 * 20480)
    assert found.kv_by_step == tuple((n, 20480.0 * n) for n in range(1, 5))
    assert found.output_tokens == 160 and found.cached_tokens == 1200


def test_small_screenshots_keep_every_pixel(tmp_path: Path) -> None:
    shot = page(160, 160, 3)
    (tmp_path / "a.png").write_bytes(shot.png)
    frame = read_frame(tmp_path / "a.png", 400)
    kind, _, data = frame.uri.partition(",")
    assert kind == "data:image/webp;base64" and (frame.width, frame.height) == (160, 160)
    back = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    assert back.tobytes() == Image.open(io.BytesIO(shot.png)).convert("RGB").tobytes()


def test_large_screenshots_shrink_and_broken_ones_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(page(1280, 800, 3).png)
    frame = read_frame(tmp_path / "a.png", 640)
    assert (frame.width, frame.height) == (640, 400)
    (tmp_path / "cut.png").write_bytes(page(1280, 800, 3).png[:700])
    assert "cut.png cannot be read" in read_frame(tmp_path / "cut.png", 640).problem
    assert read_frame(tmp_path / "gone.png", 640).problem == "gone.png is missing"


@given(st.integers(0, 5000))
def test_the_width_of_large_screenshots_keeps_the_budget(count: int) -> None:
    expected = dict(WIDTHS_AND_BYTES).get(width_limit(count))
    assert expected is None or expected * count <= LARGE_BUDGET


def test_plots_are_svg_that_can_share_a_page() -> None:
    plots = [
        success_bars([Bar("<b>$x$ & more", 0.5, 0.2, 0.8), Bar("none", 0.0, 0.0, 0.5)]),
        latency_histogram([0.3]),
        memory_by_step([(1, 98304.0), (2, 98304.0)], []),
    ]
    ids: list[str] = []
    for svg in plots:
        root = ElementTree.fromstring(svg)
        ids += [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        assert "currentColor" in svg and "<metadata" not in svg and "<style" not in svg
    assert len(ids) == len(set(ids))
    assert "&lt;b&gt;$x$ &amp; more" in plots[0] and "KiB" in plots[2]


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 1))
def test_quantile_is_monotone_and_inside(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= quantile(ordered, share) <= ordered[-1]
    assert quantile(ordered, 0) == ordered[0] and quantile(ordered, 1) == ordered[-1]
