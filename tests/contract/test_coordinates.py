"""Coordinates: edges, device pixel ratios, resizes, odd sizes, and refusals."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from holotron.contract.conversation import Screenshot
from holotron.contract.coordinates import (
    Convention,
    check,
    encoded_size,
    from_css,
    from_image,
    permille,
    to_css,
    to_image,
)
from holotron.contract.holotron3 import Holotron3
from holotron.contract.policy import ContractError
from holotron.contract.step import Click

from .strategies import shot

EVERY = list(Convention)
RATIOS = [1.0, 1.5, 2.0]
RESIZES = [1.0, 0.5, 1 / 3, 0.75, 1.3]


def seen(css_width: int, css_height: int, ratio: float = 1.0, resize: float = 1.0) -> Screenshot:
    """The record of a page at a device pixel ratio, sent after a resize (sizes rounded as encoders must)."""
    width = max(1, round(css_width * ratio * resize))
    height = max(1, round(css_height * ratio * resize))
    return Screenshot(b"", width, height, css_width, css_height)


pages = st.builds(seen, st.integers(1, 4000), st.integers(1, 3000), st.sampled_from(RATIOS), st.sampled_from(RESIZES))


@given(pages, st.integers(0, 1000), st.integers(0, 1000))
@example(seen(1, 1), 1000, 1000)
@example(seen(1281, 721, 1.5, 0.5), 1000, 1000)
def test_thousandths_never_leave_the_image_or_the_viewport(page: Screenshot, x: int, y: int) -> None:
    px, py = to_image(x, y, Convention.PERMILLE, page.width, page.height)
    assert 0 <= px <= page.width - 1 and 0 <= py <= page.height - 1
    assert abs(px - x / 1000 * page.width) <= (0.5 if px < page.width - 1 else 1)
    assert abs(py - y / 1000 * page.height) <= (0.5 if py < page.height - 1 else 1)
    css_x, css_y = to_css(x, y, Convention.PERMILLE, page)
    assert 0 <= css_x < page.css_width and 0 <= css_y < page.css_height


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("resize", RESIZES)
def test_pitfall_01_x_1000_clicks_the_last_pixel_column(ratio: float, resize: float) -> None:
    page = seen(801, 601, ratio, resize)
    assert to_image(1000, 1000, Convention.PERMILLE, page.width, page.height) == (
        page.width - 1,
        page.height - 1,
    )
    assert to_image(1.0, 1.0, Convention.UNIT, page.width, page.height) == (page.width - 1, page.height - 1)
    x, y = to_css(1000, 1000, Convention.PERMILLE, page)
    assert page.css_width - page.css_width / page.width == pytest.approx(x) and x < page.css_width
    assert page.css_height - page.css_height / page.height == pytest.approx(y) and y < page.css_height


@given(
    st.integers(100, 1900),
    st.integers(100, 1900),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
)
def test_pitfall_02_dpr_2_page_sent_at_half_size_lands_within_1_css_pixel(
    width: int, height: int, a: int, b: int
) -> None:
    page = seen(width, height, ratio=2.0, resize=0.5)
    target = (a % (2 * width - 1)) / 2, (b % (2 * height - 1)) / 2  # centres of boxes with whole corners
    x, y = from_css(*target, Convention.PERMILLE, page)
    point = Holotron3().point(Click(element="target", x=int(x), y=int(y)), page)
    assert point is not None
    assert abs(point[0] - target[0]) <= 1 and abs(point[1] - target[1]) <= 1


def test_pitfall_02_on_pixels_a_target_drawn_at_dpr_2_is_hit_after_halving() -> None:
    css_width, css_height, box = 1281, 719, (1103, 613, 1121, 625)  # CSS pixels
    page = Image.new("L", (2 * css_width, 2 * css_height), 0)
    ImageDraw.Draw(page).rectangle([2 * box[0], 2 * box[1], 2 * box[2] - 1, 2 * box[3] - 1], fill=255)
    sent = page.resize((css_width, css_height), Image.Resampling.BOX)
    buffer = io.BytesIO()
    sent.save(buffer, "PNG")
    screenshot = Screenshot(buffer.getvalue(), *encoded_size(buffer.getvalue()), css_width, css_height)
    bounds = sent.getbbox()
    assert bounds is not None
    middle = (bounds[0] + bounds[2]) / 2, (bounds[1] + bounds[3]) / 2
    x, y = from_image(*middle, Convention.PERMILLE, screenshot.width, screenshot.height)
    hit = to_css(x, y, Convention.PERMILLE, screenshot)
    assert abs(hit[0] - (box[0] + box[2]) / 2) <= 1 and abs(hit[1] - (box[1] + box[3]) / 2) <= 1


def test_pitfall_03_scaling_uses_the_encoded_bytes_even_if_the_window_was_resized_after_capture() -> None:
    before = shot(width=640, height=400, scale=0.5)  # a 1280 x 800 page, sent at half size
    assert encoded_size(before.png) == (640, 400)
    assert to_css(320, 200, Convention.PIXEL, before) == (640.0, 400.0)
    assert to_css(500, 500, Convention.PERMILLE, before) == (640.0, 400.0)
    after = shot(width=500, height=300)  # the next capture, of the smaller window, changes nothing above
    assert to_css(500, 500, Convention.PERMILLE, after) == (250.0, 150.0)
    assert to_css(500, 500, Convention.PERMILLE, before) == (640.0, 400.0)


@given(pages, st.sampled_from(EVERY), st.floats(0, 1), st.floats(0, 1))
@example(seen(1280, 720), Convention.PERMILLE, 1.0, 1.0)
@example(seen(3, 1, 1.5, 1 / 3), Convention.PIXEL, 1.0, 0.0)
def test_round_trip_error_is_half_a_step_and_half_a_pixel(
    page: Screenshot, convention: Convention, across: float, down: float
) -> None:
    x, y = across * page.css_width, down * page.css_height
    back = to_css(*from_css(x, y, convention, page), convention, page)
    step = 1 / 1000 if convention is Convention.PERMILLE else 0.0
    for was, now, css, pixels in (
        (x, back[0], page.css_width, page.width),
        (y, back[1], page.css_height, page.height),
    ):
        pixel = css / pixels
        bound = step * css / 2 + pixel / 2 if now < css - 1.5 * pixel else step * css / 2 + pixel
        assert abs(was - now) <= bound + 1e-6


@given(
    st.integers(1000, 4000), st.integers(0, 1000), st.sampled_from(RATIOS)
)  # a page at least as fine as the convention
def test_thousandths_come_back_within_one(css: int, c: int, ratio: float) -> None:
    page = seen(css, css, ratio)
    x, _ = from_css(*to_css(c, c, Convention.PERMILLE, page), Convention.PERMILLE, page)
    assert isinstance(x, int) and abs(x - c) <= 1


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_pixels_of_the_sent_image_are_kept(width: int, height: int) -> None:
    for corner in ((0, 0), (width - 1, height - 1), (width // 2, height // 3)):
        assert from_image(*corner, Convention.PIXEL, width, height) == corner
        assert to_image(*corner, Convention.PIXEL, width, height) == corner


@given(st.floats(0, 300), st.sampled_from([300.0, 1280.0, 333.3]))
def test_permille_is_the_nearest_thousandth(position: float, extent: float) -> None:
    assert abs(permille(position, extent) - position / extent * 1000) <= 0.5 + 1e-9


def test_pitfall_05_floats_in_thousandths_name_both_contracts() -> None:
    with pytest.raises(ContractError, match=r"y: 0\.5 .*holotron3.*nemotron_omni"):
        check(0.5, Convention.PERMILLE, field="y")
    with pytest.raises(ContractError, match=r"500\.0 is a float"):
        check(500.0, Convention.PERMILLE)


@pytest.mark.parametrize("value", [500, 1.5, 1.0000001, -0.1, math.nan, math.inf])
def test_pitfall_05_values_above_1_in_fractions_name_both_contracts(value: float) -> None:
    with pytest.raises(ContractError, match="nemotron_omni.*holotron3"):
        check(value, Convention.UNIT)


@pytest.mark.parametrize("value", [-1, 1001, 10**400])
def test_out_of_range_thousandths_are_refused(value: int) -> None:
    with pytest.raises(ContractError, match=r"outside 0\.\.1000"):
        check(value, Convention.PERMILLE)


@pytest.mark.parametrize("convention", EVERY)
@pytest.mark.parametrize("value", [True, False, "5", None, [1], 5j])
def test_what_is_not_a_number_is_refused(convention: Convention, value: object) -> None:
    with pytest.raises(ContractError, match="is not a number"):
        check(value, convention, size=100)


def test_pixels_outside_the_image_and_fractional_pixels_are_refused() -> None:
    for value in (-1, 100, 2.5):
        with pytest.raises(ContractError, match="holo1_5"):
            check(value, Convention.PIXEL, size=100)
    with pytest.raises(ValueError, match="size of the sent image"):
        check(3, Convention.PIXEL)


@pytest.mark.parametrize("convention", EVERY)
def test_points_outside_the_viewport_are_not_written(convention: Convention) -> None:
    page = seen(100, 50)
    for x, y in ((-0.1, 5.0), (100.1, 5.0), (5.0, 50.1), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="outside the image"):
            from_css(x, y, convention, page)


def test_a_screenshot_without_area_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        to_css(1, 1, Convention.PERMILLE, Screenshot(b"", 0, 10, 100, 100))
    with pytest.raises(ValueError, match="must be positive"):
        to_css(1, 1, Convention.PERMILLE, Screenshot(b"", 10, 10, 0, 100))


def test_only_png_has_a_size() -> None:
    assert encoded_size(shot(33, 17).png) == (33, 17)
    for junk in (b"", b"\xff\xd8\xff" + b"0" * 40, shot().png[:20]):
        with pytest.raises(ValueError, match="not a PNG"):
            encoded_size(junk)
