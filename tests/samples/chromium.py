"""A headless Chromium, driven by Selenium, which asks nothing of the network by itself."""

from __future__ import annotations

import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BINARY, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
HERE = bool(BINARY and DRIVER)
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage"
)


def chromium(*more: str) -> webdriver.Chrome:
    """With `more` arguments; what pages log can be asked of it."""
    options = webdriver.ChromeOptions()
    options.binary_location = BINARY or ""
    for argument in (*QUIET.split(), *more):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))
