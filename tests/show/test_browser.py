"""Every page in headless Chromium: no complaint, text stays text, narrow, dark, without scripts."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver import ActionChains, Keys

from browser import choose, every, marks, one, texts
from pages import HOSTILE, PAGES, small_study


@pytest.mark.parametrize("name", [name for name in PAGES if name != "large"])
def test_a_page_loads_without_complaint_and_without_the_network(opened, name):
    driver = opened(name)  # the fixture looks at the console
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("name", ["hostile study", "hostile reports", "hostile check", "landscape"])
def test_text_from_files_stays_text(opened, name):
    driver = opened(name)
    if name == "hostile study":
        driver.execute_script("document.querySelector('#plot svg').focus()")
        ActionChains(driver).send_keys(Keys.ARROW_RIGHT, Keys.ENTER).perform()
        assert HOSTILE in one(driver, "#record").get_property("textContent")
        assert HOSTILE in " ".join(texts(driver, "#filters label"))
    assert HOSTILE in " ".join(texts(driver, "main"))
    pictures = [image.get_attribute("alt") for image in every(driver, "img")]
    assert [text.partition(":")[0] for text in pictures] == (
        ["Contours", "In relief"] if name == "landscape" else []
    )
    assert driver.execute_script("return [typeof hacked, document.scripts.length]") == [
        "undefined",
        1 if name in ("hostile reports", "landscape") else 2,
    ]


def test_the_layers_of_a_report_are_bars_of_the_chosen_measure(opened):
    driver = opened("report")
    assert texts(driver, "ul.bars li .who") == ["fc1", "fc2"]
    assert texts(driver, "ul.bars li .much") == ["2.0 ± 0.2", "1.00 ± 0.10"]
    widths = "return Array.from(document.querySelectorAll('.fill'), (fill) => fill.style.width)"
    assert driver.execute_script(widths) == ["100%", "50%"]
    choose(driver, "Measure", "weight norm†")
    assert driver.execute_script(widths) == ["75%", "100%"]
    assert len(every(driver, ".error")) == 0
    one(driver, "table.bars thead th:nth-child(2) button").click()
    assert texts(driver, "table.bars tbody th") == ["fc2", "fc1"]


def test_of_a_long_table_the_first_rows_of_any_order_are_shown_until_all_are_asked_for(opened):
    driver = opened("deep")
    layers, values = every(driver, "table")
    names = "return Array.from(arguments[0].tBodies[0].rows, (row) => row.children[0].textContent)"
    assert driver.execute_script(names, layers) == [f"fc{number}" for number in range(200)]
    assert len(driver.execute_script(names, values)) == 200
    assert len(every(driver, "ul.bars li")) == 300
    # Sorted are all rows, not only those that were shown.
    layers.find_elements("css selector", "thead button")[1].click()
    layers.find_elements("css selector", "thead button")[1].click()
    falling = sorted(range(300), key=lambda number: (abs(number - 180), number))
    assert driver.execute_script(names, layers) == [f"fc{number}" for number in falling[:200]]
    button, other = every(driver, "button.rest")
    assert [button.text, other.text] == ["Show all 300 rows", "Show all 600 rows"]
    button.click()
    assert driver.execute_script(names, layers) == [f"fc{number}" for number in falling]
    assert not button.is_displayed()
    assert one(driver, "#said").text == "All 300 rows are shown"
    assert driver.switch_to.active_element.get_attribute("role") == "region"
    layers.find_elements("css selector", "thead button")[0].click()
    assert driver.execute_script(names, layers) == [f"fc{number}" for number in range(200)]
    assert button.is_displayed()
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert [len(driver.execute_script(names, table)) for table in (layers, values)] == [300, 600]


def test_the_invariance_plot_tells_ratios_and_follows_its_choices(opened):
    driver = opened("check")
    driver.execute_script("document.querySelector('#plot svg').focus()")
    ActionChains(driver).send_keys(Keys.HOME).perform()
    assert one(driver, "#said").text.startswith("2 measures, original")
    ActionChains(driver).send_keys(Keys.END).perform()
    assert one(driver, "#said").text == (
        "hessian trace, network rewritten 2, value 0.5000, ÷ original 0.2500, largest drift 3.000, "
        "verdict moves"
    )
    assert len(marks(driver)) == 6
    legend = every(driver, ".legend button")
    assert [button.text for button in legend] == ["hessian trace × 0.25 … 4", "relative flatness"]
    legend[0].click()
    assert len(marks(driver)) == 3
    assert driver.switch_to.active_element.get_attribute("aria-pressed") == "false"
    choose(driver, "Of", "fc1")
    assert one(driver, "#count").text == "1 of 2 measures, fc1: 1 stay as they are, 0 move"


def test_charts_of_a_page_are_drawn_and_told_mark_by_mark(opened):
    driver = opened("charts")
    assert len(every(driver, "figure .plot .mark")) == 5
    assert texts(driver, ".legend li") == ["a", "b", "flat", HOSTILE]
    driver.execute_script("document.querySelectorAll('figure .plot svg')[0].focus()")
    ActionChains(driver).send_keys(Keys.HOME).perform()
    assert one(driver, "#said").text == "a, one, flatness 1.000, gap 0.1000"
    driver.execute_script("document.querySelectorAll('figure .plot svg')[1].focus()")
    ActionChains(driver).send_keys(Keys.END).perform()
    assert one(driver, "#said").text == f"{HOSTILE}, fc2, value 4.000".replace("\u2028", " ")
    label = every(driver, "figure .plot svg")[1].get_attribute("aria-label")
    assert label.startswith("value against layer: flat, ")
    lines = every(driver, "figure .plot .line")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("name", "dark"), [(name, place % 2 == 0) for place, name in enumerate(PAGES) if name != "large"]
)
def test_nothing_sticks_out_of_a_narrow_page_and_both_schemes_can_be_read(opened, name, dark):
    driver = opened(name, width=400, dark=dark)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 400
    paper, ink = driver.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    light, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in (paper, ink))
    assert (light < 0.2 < 0.8 < text) if dark else (text < 0.2 < 0.8 < light)


def test_without_scripts_the_tables_are_there(opened):
    driver = opened("report")
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver = opened("study")
        assert len(every(driver, "noscript tbody tr")) == len(small_study().networks)
        assert one(driver, "table.correlations").is_displayed()
        assert not one(driver, "#explore").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
