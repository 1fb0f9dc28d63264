"""A headless Chromium that pages are tested and photographed in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select

# Debian's names; the browser and its driver must be of one version, and packages keep them so.
_BROWSERS, _DRIVER = ("chromium", "chromium-browser", "google-chrome"), "chromedriver"
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, for whom Chromium has no sandbox; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def installed() -> tuple[str, str] | None:
    """Paths of the browser and its driver; None where one of them is missing."""
    browser = next((path for path in map(shutil.which, _BROWSERS) if path), None)
    driver = shutil.which(_DRIVER)
    return (browser, driver) if browser and driver else None


def start() -> WebDriver:
    """A browser that keeps what pages write to its console; close it with ``quit``."""
    found = installed()
    assert found is not None
    options = webdriver.ChromeOptions()
    for switch in _SWITCHES:
        options.add_argument(switch)
    options.binary_location = found[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    os.environ["SE_OFFLINE"] = "true"  # Selenium must not look for another driver on the network
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))


def show(driver: Any, path: Path, width: int = 1280, height: int = 1000, *, dark: bool = False) -> None:
    """Open a file in a window of a size, light or dark."""
    resize(driver, width, height)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get(path.resolve().as_uri())


def resize(driver: Any, width: int, height: int) -> None:
    """Set the size of the window."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def complaints(driver: Any) -> list[str]:
    """What the console has seen since the last call: errors, refused scripts, failed loads."""
    return [entry["message"] for entry in driver.get_log("browser")]


def one(driver: Any, selector: str) -> Any:
    """The first element of a kind."""
    return driver.find_element(By.CSS_SELECTOR, selector)


def every(driver: Any, selector: str) -> list[Any]:
    """All elements of a kind."""
    return driver.find_elements(By.CSS_SELECTOR, selector)


def texts(driver: Any, selector: str) -> list[str]:
    """Their texts, hidden ones too."""
    script = "return Array.from(document.querySelectorAll(arguments[0]), (one) => one.textContent)"
    return driver.execute_script(script, selector)


def choose(driver: Any, label: str, text: str) -> None:
    """Take an option of a labelled choice."""
    Select(
        one(driver, f".choose:nth-of-type({labels(driver).index(label) + 1}) select")
    ).select_by_visible_text(text)


def labels(driver: Any) -> list[str]:
    """What can be chosen on the page."""
    return texts(driver, ".choose span")


def marks(driver: Any) -> list[str]:
    """Where the marks of the plot are."""
    script = "return Array.from(document.querySelectorAll('#plot .mark'), (m) => m.getAttribute('transform'))"
    return driver.execute_script(script)
