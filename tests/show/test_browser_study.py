"""The page of a study in headless Chromium: pointing, filtering, sorting, switching and keys work."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import choose, every, marks, one, texts
from flatness.study.correlate import correlation
from pages import small_study


def tick(driver, group, value):
    """Press a box of a filter."""
    for box in every(driver, "#filters fieldset"):
        if box.find_element(By.CSS_SELECTOR, "legend").text == group:
            for label in box.find_elements(By.CSS_SELECTOR, "label"):
                if label.text.strip() == value:
                    label.click()
                    return
    raise AssertionError(f"no box {group} {value}")


def shown_values(driver):
    """The correlation table: a dictionary per quantity, by column."""
    script = """
        const pair = (cell) => [cell.dataset.key, cell.textContent];
        const cells = (row) => Array.from(row.querySelectorAll("td"), pair);
        const rows = Array.from(document.querySelectorAll("table.correlations tbody tr"));
        const named = rows.map((row) => [row.dataset.quantity, Object.fromEntries(cells(row))]);
        return Object.fromEntries(named)"""
    return driver.execute_script(script)


def number(text):
    return float(text.split(" ")[0].replace("−", "-"))


def test_pointing_at_a_network_tells_its_configuration_and_values(opened):
    driver = opened("study")
    place = driver.execute_script(
        "const m = document.querySelector('#plot .mark').getBoundingClientRect();"
        "return [m.x + m.width / 2, m.y + m.height / 2]"
    )
    actions = ActionChains(driver)
    actions.w3c_actions.pointer_action.move_to_location(*map(round, place))
    actions.perform()
    tip = one(driver, "#plot .tip")
    assert tip.is_displayed()
    told = dict(zip(texts(driver, ".tip dt"), texts(driver, ".tip dd"), strict=True))
    number = int(one(driver, ".tip strong").text.removeprefix("Network "))
    row = small_study().to_frame().iloc[number - 1]
    assert told["batch size"] == str(row["batch_size"])
    assert told["optimizer"] == row["optimizer"]
    assert float(told["test loss − training loss"]) == pytest.approx(row["gap"], rel=1e-3)
    assert float(told["Hessian trace, network"].rstrip("*")) == pytest.approx(
        row["hessian_trace:network"], rel=1e-3
    )
    actions = ActionChains(driver)
    actions.w3c_actions.pointer_action.move_to_location(2, 2)
    actions.perform()
    assert not tip.is_displayed()


def test_a_filter_changes_count_plot_table_and_correlations(opened):
    driver = opened("study")
    kept = small_study().kept()
    assert one(driver, "#count").text == f"{len(kept)} of {len(kept)} networks shown"
    before = shown_values(driver)
    tau = small_study().correlations("").set_index("quantity").loc["hessian_trace:fc1"]
    assert before["hessian_trace:fc1"]["kendall"] == (
        f"{tau['kendall']:+.2f} [{tau['kendall_low']:+.2f}, {tau['kendall_high']:+.2f}]".replace("-", "−")
    )
    tick(driver, "optimizer", "adam")
    tick(driver, "learning rate", "0.05")
    few = kept[(kept["optimizer"] != "adam") & (kept["learning_rate"] != 0.05)]
    assert one(driver, "#count").text == f"{len(few)} of {len(kept)} networks shown"
    assert len(marks(driver)) == len(few)
    assert len(every(driver, "#rows tbody tr")) == len(few)
    assert one(driver, "#basis").text.startswith(
        f"Of the {len(few)} networks shown, against test loss − training loss"
    )
    for name, cells in shown_values(driver).items():
        x, y = few[name], few["gap"]
        assert number(cells["kendall"]) == pytest.approx(stats.kendalltau(x, y).statistic, abs=0.0051)
        assert number(cells["spearman"]) == pytest.approx(stats.spearmanr(x, y).statistic, abs=0.0051)
        assert number(cells["pearson"]) == pytest.approx(stats.pearsonr(x, y).statistic, abs=0.0051)
        assert cells["n"] == str(len(few))
        assert cells["granulated"] == cells["p_value"] == ""  # they belong to the whole analysis
    WebDriverWait(driver, 10).until(lambda driver: "interval" in one(driver, "#found").text)
    told = re.search(r"interval is \[(.*), (.*)\] \(400 resamples\)", one(driver, "#found").text)
    assert told is not None
    exact = correlation(few["hessian_trace:network"], few["gap"], "kendall")
    # The ends of an interval over 400 resamples have a standard error of about a thirtieth of its length.
    near = 0.2 * (exact.high - exact.low)
    assert [number(told[1]), number(told[2])] == pytest.approx([exact.low, exact.high], abs=near)
    [every_box] = [button for button in every(driver, "#filters button") if button.text == "Show all"]
    every_box.click()
    assert shown_values(driver) == before


def test_correlations_of_the_page_are_exact_with_ties(opened):
    """The same functions on numbers with many ties, to rounding."""
    driver = opened("study")
    generator = np.random.default_rng(1)
    for size in (3, 10, 257):
        x, y = (generator.integers(0, 6, size).astype(float).tolist() for _ in range(2))
        found = driver.execute_script(
            "return correlations(arguments[0], arguments[1], Array.from(arguments[0].keys()))", x, y
        )
        with np.errstate(all="ignore"):
            assert found["kendall"] == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12, nan_ok=True)
            assert found["spearman"] == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12, nan_ok=True)
            assert found["pearson"] == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12, nan_ok=True)


def test_another_measure_layer_target_or_axis_changes_the_plot(opened):
    driver = opened("study")
    seen = [marks(driver)]
    assert texts(driver, "#plot text.name") == ["Hessian trace, network", "test loss − training loss"]
    choose(driver, "Layer", "fc1")
    seen.append(marks(driver))
    choose(driver, "Measure", "neuron flatness")
    assert texts(driver, "#plot text.name")[0] == "neuron flatness, largest of all"
    seen.append(marks(driver))
    every(driver, ".ticks input")[0].click()
    seen.append(marks(driver))
    choose(driver, "Against", "test error")
    seen.append(marks(driver))
    assert texts(driver, "#plot text.name")[1] == "test error"
    assert len({tuple(places) for places in seen}) == len(seen)
    kept = small_study().kept()
    tau = stats.kendalltau(kept["hessian_trace:fc2"], kept["test_error"]).statistic
    assert number(shown_values(driver)["hessian_trace:fc2"]["kendall"]) == pytest.approx(tau, abs=0.0051)
    assert "recomputed here" in one(driver, "#basis").text


def test_colours_follow_a_hyperparameter_and_come_with_shapes(opened):
    driver = opened("study")
    look = """const marks = Array.from(document.querySelectorAll("#plot .mark"));
        return new Set(marks.map((mark) => mark.getAttribute(arguments[0]))).size"""
    first = texts(driver, "#legend li")
    assert first[:1] + first[-3:] == ["batch size", "optimizer", "adam", "sgd"]
    choose(driver, "Colour", "learning rate")
    assert [driver.execute_script(look, name) for name in ("fill", "d")] == [3, 2]
    choose(driver, "Shape", "as colour")
    assert [driver.execute_script(look, name) for name in ("fill", "d")] == [3, 3]
    assert texts(driver, "#legend li") == ["learning rate", "0.05", "0.1", "0.2"]
    choose(driver, "Colour", "one colour")
    assert driver.execute_script(look, "fill") == 1


def test_a_table_is_sorted_by_mouse_and_by_keys(opened):
    driver = opened("study")
    column = "table.correlations thead th:nth-child(5)"
    one(driver, f"{column} button").click()
    rising = [number(cell) for cell in texts(driver, "table.correlations tbody td[data-key=pearson]")]
    assert rising == sorted(rising)
    assert one(driver, column).get_attribute("aria-sort") == "ascending"
    one(driver, f"{column} button").send_keys(Keys.ENTER)
    falling = [number(cell) for cell in texts(driver, "table.correlations tbody td[data-key=pearson]")]
    assert falling == sorted(rising, reverse=True)
    assert one(driver, "#said").text == "Sorted by Pearson's r, largest first"
    one(driver, "#rows thead th:nth-child(3) button").send_keys(Keys.ENTER, Keys.ENTER)
    rates = [float(cell) for cell in texts(driver, "#rows tbody td:nth-child(3)")]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3
    assert one(driver, "#rows thead th:nth-child(3)").get_attribute("aria-sort") == "descending"


def test_the_keyboard_reaches_every_network_and_its_record(opened):
    driver = opened("study")
    plot = one(driver, "#plot svg")
    driver.execute_script("arguments[0].focus()", plot)
    ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
    first = one(driver, "#said").text
    ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
    second = one(driver, "#said").text
    assert first != second
    assert re.match(
        r"Network \d+, batch size (16|64), learning rate 0\.\d+, optimizer (sgd|adam), seed \d", second
    )
    ActionChains(driver).send_keys(Keys.ENTER).perform()
    heading = driver.switch_to.active_element
    name, settings = second.split(", Hessian trace")[0].split(", ", 1)
    assert heading.text == f"{name}: {settings}"
    record = one(driver, "#record").text
    assert "80" in record
    assert "training loss 2.000 → 0.02532, log scale, every 2 epochs" in record
    assert len(every(driver, "#record tbody tr")) == 9
    values = small_study().to_frame().set_index("key")
    key = values.index[int(name.removeprefix("Network ")) - 1]
    cells = dict(
        zip(texts(driver, "#record tbody th"), texts(driver, "#record tbody td:nth-child(2)"), strict=True)
    )
    value = values.loc[key, "neuron_flatness:fc2:max"]
    told, error = cells["neuron flatness, fc2, largest"].replace("*", "").split(" ± ")
    assert float(told) == pytest.approx(value, rel=1e-3)
    assert float(error) == pytest.approx(0.01 * value, rel=1e-3)
    ActionChains(driver).send_keys(Keys.ESCAPE).perform()
    assert not one(driver, "#record").is_displayed()
    assert driver.switch_to.active_element == plot
    link = one(driver, "#rows tbody a")
    link.send_keys(Keys.ENTER)
    assert driver.switch_to.active_element.text.startswith(f"Network {link.text}: ")
    one(driver, "table.correlations tbody tr:nth-child(2) button").send_keys(Keys.ENTER)
    chosen = one(driver, 'table.correlations tr[aria-current="true"] button').text
    assert texts(driver, "#plot text.name")[0] == chosen


def test_values_that_no_axis_can_show_are_counted(opened):
    driver = opened("odd")
    kept = len(small_study().kept())
    assert len(marks(driver)) == kept - 2  # the axis is linear where a value is negative
    assert one(driver, "#missing").text == "2 of the networks shown have no finite value here."
    every(driver, ".ticks input")[0].click()
    assert len(marks(driver)) == kept - 3
    assert one(driver, "#missing").text.endswith("1 are zero or negative and not on a logarithmic axis.")


def test_networks_that_are_left_out_can_be_looked_up_with_the_reason(opened):
    driver = opened("study")
    made = small_study()
    tick(driver, "analysis", f"also the {len(made.left_out())} networks left out of it")
    assert one(driver, "#count").text == f"{len(made.networks)} of {len(made.networks)} networks shown"
    one(driver, "#rows > button").click()
    reasons = texts(driver, "#rows tbody td:nth-child(6)")
    assert {reason: reasons.count(reason) for reason in made.filtered_out()} == made.filtered_out()
    one(driver, f"#rows tbody tr:nth-child({reasons.index('diverged') + 1}) a").click()
    assert one(driver, "#record .failed").text == "Left out of the analysis: diverged."
    driver = opened("pending")
    assert one(driver, "#rows caption").text.startswith(f"The first 50 of {len(made.networks)} networks")
    assert not one(driver, "#explore").is_displayed()


def test_parts_have_their_own_networks_gap_and_table(opened):
    driver = opened("parts")
    assert texts(driver, "#plot text.name")[1] == "test loss − training loss"
    tables = every(driver, "table.correlations")
    assert [table.is_displayed() for table in tables] == [True, False]
    choose(driver, "Part", "second")
    assert [table.is_displayed() for table in tables] == [False, True]
    assert texts(driver, "#plot text.name")[1] == "training accuracy − test accuracy"


def test_a_thousand_networks_with_sixty_quantities_are_quick(opened):
    """A filter takes 90 ms on two busy cores; the fastest of several tells the page from the machine."""
    driver, loads = opened("large"), []
    for _ in range(3):
        driver.get(driver.current_url)  # refresh() now and then loses the page, with chromedriver 150
        loads.append(
            driver.execute_script(
                "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
            )
        )
    took = driver.execute_async_script(
        """const done = arguments[0], took = [];
        const boxes = document.querySelectorAll("#filters input[type=checkbox]");
        const press = () => {
          const start = performance.now();
          boxes[took.length % 2].click();
          requestAnimationFrame(() => setTimeout(() => {
            took.push(performance.now() - start);
            if (took.length < 8) press(); else done(took);
          }));
        };
        press();"""
    )
    assert one(driver, "#count").text == "819 of 819 networks shown"
    assert min(took) < 200
    field = one(driver, 'input[aria-label="learning rate to"]')  # twenty values: a range in place of boxes
    field.send_keys("0.05", Keys.ENTER)
    assert one(driver, "#count").text == "205 of 819 networks shown"
    assert math.isfinite(min(loads))
    assert min(loads) < 600
