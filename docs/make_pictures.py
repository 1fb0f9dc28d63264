"""Write docs/pictures: the demo, the page of a study of the gallery and a check's plot, in headless Chromium.

Run it after a page changed: ``make pictures``. Everything is made anew by the commands that users type, in a
few minutes. A picture is a function of the folder they worked in; add it to `PICTURES`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

import browser as chromium  # noqa: E402 (a module of the tests)

WIDTH = 1280
STUDY = "petzka2021-cifar10"
TRAINED = """
title = "A network to check"
[data]
name = "digits"
standardize = true
limit = 600
[model]
name = "mlp"
options = { sizes = [64, 32, 16, 10] }
[grid]
batch_size = 16
learning_rate = 0.1
seed = 1
[stop]
loss = 0.1
epochs = 200
"""


def flatness(folder: Path, *words: str) -> None:
    """Run the command line in a folder."""
    subprocess.run([sys.executable, "-m", "flatness", *words], cwd=folder, check=True)


def work(folder: Path) -> None:
    """Run a demo, show a study of the gallery, and check a network."""
    flatness(folder, "demo", "--out", "demo")
    (folder / "digits.toml").write_text(TRAINED, encoding="utf-8")
    flatness(folder, "study", "run", "digits.toml", "--scale", "paper", "--out", "trained", "--jobs", "1")
    weights = sorted((folder / "trained" / "weights").iterdir())[0]
    flatness(folder, "study", "unpack", str(DOCS / "gallery" / "records" / f"{STUDY}.json.xz"), "study")
    flatness(folder, "study", "show", "study")
    network = ("-m", "mlp", "--model-arg", "sizes=[64,32,16,10]", "-d", "digits", "--standardize")
    flatness(folder, "check", str(weights), *network, "--samples", "300", "--trials", "10", "--out", "check")


def demo(driver: Any, folder: Path, name: str, dark: bool) -> None:
    """The top of the demo's page: a bar per network and the first figure."""
    chromium.show(driver, folder / "demo" / "index.html", WIDTH, 1000, dark=dark)
    driver.execute_script("document.querySelector('main > .scroll').style.display = 'none'")
    photograph(driver, name, "document.querySelectorAll('main > figure')[1]")


def study(driver: Any, folder: Path, name: str, dark: bool) -> None:
    """A study's page down to the first rows of its correlations, with the pointer on a network."""
    chromium.show(driver, folder / "study" / "index.html", WIDTH, 1200, dark=dark)
    walk(driver, "Math.floor(0.72 * count)")
    photograph(driver, name, "document.querySelectorAll('table.correlations tbody tr')[8]")


def check(driver: Any, folder: Path, name: str, dark: bool) -> None:
    """The plot of a check and its legend."""
    chromium.show(driver, folder / "check" / "index.html", WIDTH, 1000, dark=dark)
    photograph(driver, name, "document.querySelector('main > .scroll tbody tr')")


def walk(driver: Any, steps: str) -> None:
    """Go to a point of the plot with the keys, then hide that the keys did it."""
    driver.execute_script(
        f"""const svg = document.querySelector("#plot svg"), count = svg.querySelectorAll(".mark").length;
        svg.style.outline = "none"; svg.focus();
        const right = new KeyboardEvent("keydown", {{ key: "ArrowRight" }});
        for (let i = 0; i < {steps}; i++) svg.dispatchEvent(right);"""
    )


def photograph(driver: Any, name: str, end: str) -> None:
    """Save the page from its top to where an element begins, in few colours."""
    bottom = driver.execute_script(f"return {end}.getBoundingClientRect().top + scrollY")
    driver.execute_script("scrollTo(0, 0)")
    chromium.resize(driver, WIDTH, int(bottom))
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    few = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(DOCS / "pictures" / f"{name}.png", optimize=True)


PICTURES = {"demo": demo, "study": study, "check": check}


def main() -> None:
    """Work, then photograph everything, light and dark."""
    (DOCS / "pictures").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made)
        if len(sys.argv) == 1 or not folder.exists():
            folder.mkdir(exist_ok=True)
            work(folder)
        driver = chromium.start()
        for name, take in PICTURES.items():
            take(driver, folder, name, False)
            take(driver, folder, f"{name}-dark", True)
        driver.quit()


if __name__ == "__main__":
    main()
