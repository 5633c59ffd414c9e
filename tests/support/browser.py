"""A browser for tests: Debian's chromium, driven by selenium, and what a reader does in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

REQUIRED = "ENCORE_TEST_BROWSER"
"""Set where a browser must be there: tests that need one fail without it, instead of being skipped."""
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-prefers-reduced-motion",
)  # fmt: skip
DESKTOP, PHONE, SMALL_PHONE = (1280, 1400), (390, 844), (320, 640)


def start_browser(profile: Path) -> Any:
    """A browser with its console recorded. Where there is none, the test is skipped, or fails if one is required."""
    try:
        from selenium import webdriver
    except ImportError:
        _missing("selenium is not installed; it is in the extra `dev`")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        _missing("there is no chromium with its chromedriver here; Debian has them as chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def _missing(what: str) -> NoReturn:
    if os.environ.get(REQUIRED):
        pytest.fail(f"{what}, and {REQUIRED} is set")
    pytest.skip(what)


def nothing_went_wrong(browser: Any) -> None:
    """Its console is empty, and nothing was fetched."""
    assert browser.get_log("browser") == []
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert fetched == []


def resize(browser: Any, size: tuple[int, int]) -> None:
    width, height = size
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size != DESKTOP},
    )


def find(browser: Any, selector: str) -> list[Any]:
    return list(browser.find_elements("css selector", selector))


def texts(browser: Any, selector: str) -> list[str]:
    """All at once: asking for one after the other takes as many messages."""
    told = "return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText ?? found.textContent)"
    return [str(text).strip() for text in browser.execute_script(told, selector)]


def shot(browser: Any, path: Path) -> None:
    assert browser.save_screenshot(str(path))
    assert path.stat().st_size > 10_000
