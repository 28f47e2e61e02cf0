"""The page at `/` in a real headless browser: types, watches text stream in and numbers move, stops, and finds its history again."""

import shutil
import time

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from toy_process import ServerProcess

QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,860"
)


@pytest.fixture
def browser(require):
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    require("browser", bool(binary and driver_path))
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in QUIET.split():
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    yield driver
    driver.quit()


def until(condition, what, seconds=20):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


def say(browser, text):
    box = browser.find_element(By.ID, "text")
    box.send_keys(text, Keys.ENTER)


def answer(browser):
    return browser.execute_script("return [...document.querySelectorAll('.assistant .body')].at(-1)?.innerText ?? ''")


def number(browser, key):
    text = browser.find_element(By.CSS_SELECTOR, f"[data-key={key}] span").text
    return float(text.split()[0]) if text != "–" else 0.0


def working(browser):
    return bool(browser.find_elements(By.CSS_SELECTOR, ".working"))


def errors_of(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.heavy
def test_a_conversation(browser):
    with ServerProcess.toy(delay=0.02) as server:
        browser.get(server.where + "/")
        until(lambda: browser.find_element(By.ID, "state").text == "ready", "the server's state")
        say(browser, "some **bold** text, a list of words, and a good deal more of it to stream slowly")
        early = until(lambda: answer(browser), "the first words")
        until(lambda: len(answer(browser)) > len(early) > 0, "more words")
        assert working(browser)
        assert browser.find_element(By.ID, "stop").is_displayed()
        until(lambda: number(browser, "out") > 1, "tokens a second")
        assert number(browser, "run") == 1
        until(lambda: not working(browser), "the end")
        assert answer(browser).startswith("user:some bold text")
        assert browser.find_element(By.CSS_SELECTOR, ".assistant strong").text == "bold"
        assert "tokens/s" in browser.find_element(By.CSS_SELECTOR, ".figures").text
        assert browser.find_element(By.CSS_SELECTOR, "[data-key=out] .stroke").get_attribute("d").count("L") > 0
        until(lambda: number(browser, "run") == 0, "an idle server")
        browser.refresh()
        assert until(lambda: answer(browser), "the history").startswith("user:some bold text")
        browser.find_element(By.ID, "new").click()
        assert not answer(browser)
        assert errors_of(browser) == []


@pytest.mark.heavy
def test_stop_ends_the_request_in_the_engine(browser):
    with ServerProcess.toy(delay=0.1) as server:
        browser.get(server.where + "/")
        for stop in (
            lambda: browser.find_element(By.ID, "stop").click(),
            lambda: browser.find_element(By.ID, "text").send_keys(Keys.ESCAPE),
        ):
            say(browser, "a text of which only the beginning will be answered, since somebody stops it before its end comes")
            until(lambda: len(answer(browser)) > 3, "the first words")
            stop()
            until(lambda: not working(browser), "the end")
            until(lambda: httpx.get(f"{server.where}/load").json()["server_load"] == 0, "an idle engine")
            assert "only the beginning will be answered" not in answer(browser)
            assert "stopped" in browser.find_elements(By.CSS_SELECTOR, ".figures")[-1].text
            browser.find_element(By.ID, "new").click()


@pytest.mark.heavy
def test_a_missing_key_is_asked_for_and_markup_stays_text(browser):
    with ServerProcess.toy(api_key=["sesame"]) as server:
        browser.get(server.where + "/")
        say(browser, "<img src=x onerror=alert(1)> `<b>`")
        alert = until(lambda: browser.find_elements(By.CSS_SELECTOR, "[role=alert]"), "an error")
        assert "API key" in alert[0].text
        browser.find_element(By.ID, "key").send_keys("sesame")
        say(browser, "<img src=x onerror=alert(1)> `<b>`")
        until(lambda: answer(browser) and not working(browser), "an answer")
        assert "<img src=x" in answer(browser)
        assert not browser.find_elements(By.CSS_SELECTOR, "#log img, #log b")


@pytest.mark.heavy
def test_every_control_has_a_name(browser):
    with ServerProcess.toy() as server:
        browser.get(server.where + "/")
        for control in browser.find_elements(By.CSS_SELECTOR, "button, input, textarea, [role=log]"):
            if control.is_displayed():
                assert control.accessible_name.strip(), control.get_attribute("outerHTML")
        browser.find_element(By.ID, "theme").click()
        assert browser.execute_script("return document.documentElement.dataset.theme") in ("dark", "light")


@pytest.mark.heavy
def test_the_default_model_answers_on_the_page(browser, server):
    browser.get(server.where + "/")
    until(lambda: "smollm2" in browser.find_element(By.ID, "model").text, "the model's name")
    browser.execute_script(
        "const t = document.getElementById('temperature'); t.value = 0; t.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    say(browser, "What is the capital of France? Answer in one short sentence.")
    until(lambda: answer(browser) and not working(browser), "an answer", 60)
    assert "Paris" in answer(browser)
    until(lambda: number(browser, "run") == 0, "an idle server")
    assert errors_of(browser) == []
