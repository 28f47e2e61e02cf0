"""Takes the pictures of docs/guide/images: starts a server of the default model and drives Chromium over its page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import httpx
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "samples"))
from chromium import chromium  # noqa: E402
from toy_process import SERVE, SMALL_POOL, ServerProcess  # noqa: E402

FOLDER = ROOT / "docs" / "guide" / "images"
FILL = """
for (const [id, value] of Object.entries(arguments[0])) {
  const box = document.getElementById(id);
  box.value = value; box.dispatchEvent(new Event("input", { bubbles: true }));
}
"""


class Page:
    """The page in one colour scheme and size."""

    def __init__(self, driver: webdriver.Chrome, where: str, scheme: str, width: int, height: int) -> None:
        self.driver = driver
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        driver.get(where + "/")
        driver.execute_script("localStorage.clear(); location.reload()")
        self.until(lambda: driver.find_element(By.ID, "state").text == "ready" or width < 500)

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 120
        while not condition():
            if time.monotonic() > end:
                raise SystemExit("page_pictures: the page did not come to what was waited for in two minutes")
            time.sleep(0.1)

    def set(self, **values: object) -> None:
        self.driver.execute_script(FILL, values)

    def say(self, text: str) -> None:
        self.driver.find_element(By.ID, "text").send_keys(text, Keys.ENTER)
        time.sleep(0.5)
        self.until(lambda: not self.driver.find_elements(By.CSS_SELECTOR, ".working"))

    def shoot(self, name: str) -> None:
        time.sleep(1.5)  # the live numbers come once a second
        self.driver.save_screenshot(str(FOLDER / f"{name}.png"))
        print(f"{name}.png: {(FOLDER / f'{name}.png').stat().st_size / 1000:.0f} kB")


def load(where: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "n": 4}
    httpx.post(f"{where}/v1/completions", json=body, timeout=300)


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    driver = chromium("--hide-scrollbars")
    try:
        with ServerProcess([*SERVE, *SMALL_POOL, "--tool-call-parser", "hermes"], patience=300) as server:
            take(driver, server.where)
    finally:
        driver.quit()
    return 0


def take(driver: webdriver.Chrome, where: str) -> None:
    page = Page(driver, where, "light", 1180, 760)
    page.set(temperature=0, limit=160)
    page.say("Write a Python function that checks for palindromes.")
    page.shoot("page-light")
    page = Page(driver, where, "dark", 1180, 760)
    driver.execute_script("document.getElementById('example').click(); document.getElementById('sampling').open = false;")
    driver.execute_script("document.getElementById('toolbox').open = true")
    page.set(temperature=0, choice="once", limit=120)
    page.say("How is the weather in Rome?")
    page.shoot("page-tool-call")
    thread = Thread(target=load, args=(where,))
    page = Page(driver, where, "dark", 1180, 760)
    thread.start()
    page.set(temperature=0, limit=200)
    page.say("What is the capital of France?")
    page.shoot("page-live")
    thread.join()
    page = Page(driver, where, "light", 390, 780)
    page.set(temperature=0, limit=60)
    page.say("What is the capital of France?")
    page.shoot("page-phone")


if __name__ == "__main__":
    sys.exit(main())
