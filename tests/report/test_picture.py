"""The README's picture: its size, which episodes it shows, where the marker lands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holotron.agent.trajectory import write_run
from holotron.report.episodes import read_recorded
from holotron.report.marker import Marker
from holotron.report.picture import MARK, _marked, choose, write_picture
from tests.report.run_folder import run_info, small_run, write_episode


def test_a_picture_of_any_run_is_as_wide_as_promised(tmp_path: Path) -> None:
    path = write_picture(small_run(tmp_path / "run"), tmp_path / "docs" / "run.png")
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width == 2400 and 600 < image.height < 4000


def test_failures_are_not_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([(f"t{number}", 0) for number in range(10)]))
    for number in range(10):
        write_episode(tmp_path, f"t{number}", 0, steps=2, status="failure" if number == 9 else "success")
    chosen = choose(read_recorded(tmp_path)[1], 4)
    assert [one.outcome for one in chosen] == ["success"] * 3 + ["failure"]
    assert len({one.task for one in chosen}) == 4


def test_episodes_can_be_named_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    write_picture(run, tmp_path / "a.png", [("web", 0)])
    with pytest.raises(ValueError, match="web seed 5"):
        write_picture(run, tmp_path / "b.png", [("web", 5)])


def test_a_run_with_nothing_to_show_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, run_info([("a", 0)]))
    with pytest.raises(ValueError, match="no episode"):
        write_picture(tmp_path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("point", [(80.0, 80.0), (40.5, 121.0)])
def test_the_marker_is_centred_on_its_point(point: tuple[float, float]) -> None:
    shot = _marked(Image.new("RGB", (320, 320), "white"), Marker(point, 7.0), 2.0, 2.0)
    distance = np.abs(np.asarray(shot, dtype=int) - np.array(MARK)).sum(axis=2)
    ys, xs = np.nonzero(distance < 60)
    assert len(xs) > 100
    assert (xs.min() + xs.max() + 1) / 2 == pytest.approx(2 * point[0], abs=1.0)
    assert (ys.min() + ys.max() + 1) / 2 == pytest.approx(2 * point[1], abs=1.0)
