"""The page in a browser: Debian's chromium opens the file and does what a reader would do. Nothing is fetched, and its
console stays empty."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import encore
from encore.units import bytes_text
from support import browser as chromium
from support.browser import DESKTOP, PHONE, SMALL_PHONE, find, nothing_went_wrong, resize, shot, texts
from support.example_report import tower_plan


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    measured = [encore.Point("eager <i>", 1.05, tower_plan().unplanned.step_peak)]
    peers = [encore.Point("checkpoints", 1.3, tower_plan().planned.step_peak)]
    return tower_plan().to_html(tmp_path_factory.mktemp("page") / "report.html", measured=measured, peers=peers)


@pytest.fixture
def opened(browser: Any, path: Path) -> Iterator[Any]:
    """The page, freshly loaded in a desktop's window; afterwards the console is looked at."""
    resize(browser, DESKTOP)
    dark(browser, False)
    browser.get(path.as_uri())
    yield browser
    nothing_went_wrong(browser)


def next_frame(browser: Any) -> None:
    """Wait until the page has been told: styles follow at once, but events of media and size come with a frame."""
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")


def dark(browser: Any, wanted: bool) -> None:
    feature = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    next_frame(browser)


def press(browser: Any, key: str) -> None:
    """A key, wherever the focus is."""
    from selenium import webdriver

    webdriver.ActionChains(browser).send_keys(getattr(webdriver.Keys, key, key)).perform()


def column(browser: Any, number: int) -> list[str]:
    return texts(browser, f"#table tbody tr:not(.member) td:nth-child({number})")


def background(browser: Any) -> list[int]:
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


def test_a_browser_may_be_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv(chromium.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="there is no chromium"):
        chromium.start_browser(tmp_path)
    monkeypatch.delenv(chromium.REQUIRED)
    with pytest.raises(pytest.skip.Exception, match="there is no chromium"):
        chromium.start_browser(tmp_path)


# -- charts ------------------------------------------------------------------------------------------------------------


def test_both_charts_tell_peak_and_budget(opened: Any, tmp_path: Path) -> None:
    report = tower_plan()
    assert report.budget is not None
    for figure, prediction in (("unplanned", report.unplanned), ("planned", report.planned)):
        peak = f"peak {bytes_text(report.resident + prediction.step_peak)}"
        assert texts(opened, f"#{figure} .peak-label") == [peak]
        assert texts(opened, f"#{figure} .budget-label") == [f"budget {bytes_text(report.budget)}"]
        assert texts(opened, f"#{figure} .y-title") == ["memory held (MiB)"]
        assert texts(opened, f"#{figure} .x-title") == ["moment of the step"]
        (line,) = find(opened, f"#{figure} line.budget")
        (top,) = find(opened, f"#{figure} circle.peak")
        over = report.resident + prediction.step_peak > report.budget
        assert (top.location["y"] + top.size["height"] / 2 < line.location["y"]) == over
    assert texts(opened, "#total") == [bytes_text(report.resident + report.planned.step_peak)]
    shot(opened, tmp_path / "light.png")


def test_there_is_an_area_for_every_kind_of_memory(opened: Any) -> None:
    profiles = [tower_plan().unplanned.profile, tower_plan().planned.profile]
    used = [layer for layer in profiles[0].bytes if any(any(profile.bytes[layer]) for profile in profiles)]
    assert {"parameters", "inputs", "feature maps", "recomputed", "gradients"} < set(used)
    for figure in ("unplanned", "planned"):
        assert [area.get_attribute("data-layer") for area in find(opened, f"#{figure} .area")] == used
    legend = texts(opened, "#legend li")
    assert [words.startswith(layer) for words, layer in zip(legend, used, strict=False)] == [True] * len(used)


def test_a_chart_is_read_by_keyboard(opened: Any) -> None:
    (chart,) = find(opened, "#planned svg[tabindex='0']")
    opened.execute_script("arguments[0].focus()", chart)
    press(opened, "HOME")
    (tip,) = find(opened, "#tip")
    (readout,) = find(opened, "#planned .readout")
    assert tip.is_displayed()
    first = readout.text
    assert " at moment 0 of " in first
    press(opened, "ARROW_RIGHT")
    assert " at moment 1 of " in readout.text
    press(opened, "p")
    report = tower_plan()
    assert readout.text.startswith(f"Peak: {bytes_text(report.resident + report.planned.step_peak)} at moment ")
    assert "feature maps" in tip.text
    assert "example_report.py:" in tip.text
    press(opened, "ESCAPE")
    assert not tip.is_displayed()


def test_a_chart_is_read_by_pointing_at_it(opened: Any) -> None:
    from selenium import webdriver

    (chart,) = find(opened, "#unplanned svg[tabindex='0']")
    webdriver.ActionChains(opened).move_to_element(chart).perform()
    (tip,) = find(opened, "#tip")
    assert tip.is_displayed()
    assert "gradients" in tip.text or "feature maps" in tip.text


def test_the_plans_are_drawn(opened: Any) -> None:
    report = tower_plan()
    assert len(find(opened, "#plans circle.plan")) == len(report.pareto) - 1
    assert len(find(opened, "#plans circle.taken")) == 1
    names = texts(opened, "#plans text.halo")
    assert {"this plan", "eager <i>", "checkpoints"} < set(names)
    (chart,) = find(opened, "#plans svg[tabindex='0']")
    opened.execute_script("arguments[0].focus()", chart)
    press(opened, "ENTER")
    (readout,) = find(opened, "#plans .readout")
    assert readout.text.startswith(f"this plan: {bytes_text(report.resident + report.planned.step_peak)}")


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_column_sorts(opened: Any) -> None:
    heads = find(opened, "#table th")
    assert texts(opened, "#table th") == [
        "Bytes", "Count", "Action", "Module", "Operator", "Shape", "Line", "Time", "Why"
    ]  # fmt: skip
    assert heads[0].get_attribute("aria-sort") == "descending"
    rows = sorted(column(opened, 4))
    for number, head in enumerate(heads, start=1):
        orders = []
        for _ in range(2):
            head.find_element("tag name", "button").click()
            sorts = opened.execute_script(
                "return [...document.querySelectorAll('#table th')].map((head) => head.getAttribute('aria-sort'))"
            )
            assert [place for place, sort in enumerate(sorts, start=1) if sort] == [number]
            orders.append((sorts[number - 1], column(opened, number)))
        assert {order for order, _ in orders} == {"ascending", "descending"}
        if len(set(orders[0][1])) > 1:
            assert orders[0][1] != orders[1][1]
        assert sorted(column(opened, 4)) == rows
    heads[1].find_element("tag name", "button").click()
    counts = [int(count) for count in column(opened, 2)]
    assert counts == sorted(counts, reverse=True)


def test_a_column_sorts_by_keyboard(opened: Any) -> None:
    (search,) = find(opened, "#search")
    search.click()
    for _ in range(3):  # past the box: Bytes, Count, Action
        press(opened, "TAB")
    press(opened, "ENTER")
    assert find(opened, "#table th")[2].get_attribute("aria-sort") == "ascending"
    actions = column(opened, 3)
    assert actions == sorted(actions)
    assert set(actions) == {"keep", "recompute"}


def test_the_table_is_searched(opened: Any) -> None:
    every = len(column(opened, 3))
    (search,) = find(opened, "#search")
    search.send_keys("recompute layers")
    assert 0 < len(column(opened, 3)) < every
    assert set(column(opened, 3)) == {"recompute"}
    dropped = [row for row in tower_plan().decisions if row.action == "recompute"]
    (status,) = texts(opened, "#found")
    assert f"{len(dropped)} feature maps, {bytes_text(sum(row.bytes for row in dropped))}" in status
    search.clear()
    search.send_keys("<b>bold")
    assert column(opened, 4) == ["<b>bold</b>.1"]
    search.send_keys("no such thing")
    assert texts(opened, "#found")[0].startswith("0 of ")


def test_a_row_unfolds_and_folds(opened: Any) -> None:
    (button, *_) = find(opened, "#table .unfold")
    count = int(button.text)
    opened.execute_script("arguments[0].focus()", button)
    press(opened, "ENTER")
    assert len(find(opened, "#table tr.member")) == count
    modules = texts(opened, "#table tr.member td:nth-child(4)")
    assert modules == [f"layers.{number}" for number in range(count)]
    focused = opened.switch_to.active_element
    assert focused.get_attribute("aria-expanded") == "true", "the focus stays where it was"
    press(opened, "ENTER")
    assert find(opened, "#table tr.member") == []


# -- looks -------------------------------------------------------------------------------------------------------------


def test_dark_and_light(opened: Any, tmp_path: Path) -> None:
    (button,) = find(opened, "#theme")
    assert sum(background(opened)) > 600
    button.click()
    assert sum(background(opened)) < 150
    assert button.get_attribute("aria-pressed") == "true"
    shot(opened, tmp_path / "dark.png")
    button.click()
    assert sum(background(opened)) > 600


def test_dark_where_the_reader_prefers_it(opened: Any) -> None:
    dark(opened, True)
    assert sum(background(opened)) < 150
    (button,) = find(opened, "#theme")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert sum(background(opened)) > 600


@pytest.mark.parametrize("size", [PHONE, SMALL_PHONE])
def test_a_phone_scrolls_one_way_only(opened: Any, path: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    resize(opened, size)
    opened.get(path.as_uri())
    (button, *_) = find(opened, "#table .unfold")
    opened.execute_script("arguments[0].click()", button)
    wide = opened.execute_script("return [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]")
    assert wide == [size[0]] * 3
    (label,) = find(opened, "#planned .peak-label")
    assert label.location["x"] >= 0
    assert label.location["x"] + label.size["width"] <= size[0]
    assert find(opened, "#table th")[0].is_displayed(), "there is something to sort by"
    shot(opened, tmp_path / "phone.png")


def test_charts_follow_the_window(opened: Any) -> None:
    (before,) = find(opened, "#planned svg[tabindex='0']")
    box = before.get_dom_attribute("viewBox")
    resize(opened, PHONE)
    next_frame(opened)
    (after,) = find(opened, "#planned svg[tabindex='0']")
    assert box is not None
    assert after.get_dom_attribute("viewBox") != box
    assert len(find(opened, "#planned .peak-label")) == 1
