"""The page at `/` in a real headless browser: types, watches text stream in and numbers move, stops, and finds its history again."""

import base64
import json
import time

import chromium
import httpx
import pytest
from patience import LIMIT_S
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tiny_vision import add_processor, make_vision, picture
from toy_process import SERVE, ServerProcess


@pytest.fixture
def browser(require):
    require("browser", chromium.HERE)
    driver = chromium.chromium("--window-size=1280,860")
    yield driver
    driver.quit()


def until(condition, what):
    end = time.monotonic() + LIMIT_S
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


FILL = """
for (const [id, value] of Object.entries(arguments[0])) {
  const box = document.getElementById(id);
  box.value = value; box.dispatchEvent(new Event("input", { bubbles: true }));
}
"""


def fill(browser, **values):
    """Settings by their ids."""
    browser.execute_script(FILL, {name.replace("__", "-"): value for name, value in values.items()})


def sent(browser, index=-1):
    return json.loads(browser.execute_script("return sent.at(arguments[0])", index))


def working(browser):
    return bool(browser.find_elements(By.CSS_SELECTOR, ".working"))


def errors_of(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.heavy
def test_a_conversation(browser):
    with ServerProcess.toy(delay=0.1) as server:
        browser.get(server.where + "/")
        until(lambda: browser.find_element(By.ID, "state").text == "ready", "the server's state")
        say(browser, "some **bold** text, a list of words, and a good deal more of it to stream slowly" + 900 * ".")
        early = until(lambda: answer(browser), "the first words")
        until(lambda: len(answer(browser)) > len(early) > 0, "more words")
        assert working(browser)
        assert browser.find_element(By.ID, "stop").is_displayed()
        until(lambda: number(browser, "out") > 1, "tokens a second")
        assert number(browser, "run") == 1
        server.go_on()
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
    with ServerProcess.toy(held=30) as server:
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
    fill(browser, temperature=0)
    say(browser, "What is the capital of France? Answer in one short sentence.")
    until(lambda: answer(browser) and not working(browser), "an answer")
    assert "Paris" in answer(browser)
    until(lambda: number(browser, "run") == 0, "an idle server")
    assert errors_of(browser) == []


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    make_vision(folder, "Llava")
    add_processor(folder)
    flags = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32", "--max-model-len", "64"]
    with ServerProcess([*SERVE, str(folder), *flags, "--kv-cache-memory-bytes", "8M"], patience=180) as server:
        yield server.where


def previews(browser):
    return [image.get_attribute("alt") for image in browser.find_elements(By.CSS_SELECTOR, "#pictures img")]


LISTEN = """
window.sent = [];
const real = fetch;
fetch = (...a) => { if (a[1]?.body) sent.push(a[1].body); return real(...a); };
"""
HAND_OVER = """
const [kind, name, bytes] = arguments, transfer = new DataTransfer();
transfer.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], name, { type: "image/png" }));
const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
                               : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
document.getElementById("text").dispatchEvent(event);
"""


@pytest.mark.heavy
def test_images_are_chosen_pasted_dropped_and_sent(browser, seeing, tmp_path):
    file = tmp_path / "red square.png"
    picture(1).save(file)
    bytes_ = base64.b64encode(file.read_bytes()).decode()
    browser.get(seeing + "/")
    attach = browser.find_element(By.ID, "attach")
    until(attach.is_displayed, "the button for images")
    assert attach.accessible_name == "Add images"
    browser.find_element(By.ID, "file").send_keys(str(file))
    until(lambda: previews(browser) == ["red square.png"], "a preview")
    for kind in ("paste", "drop"):
        browser.execute_script(HAND_OVER, kind, f"{kind}.png", bytes_)
    until(lambda: len(previews(browser)) == 3, "three previews")
    for name in ("paste.png", "drop.png"):
        button = browser.find_element(By.CSS_SELECTOR, f"#pictures [aria-label='Remove {name}']")
        button.send_keys(Keys.ENTER)
    assert previews(browser) == ["red square.png"]
    browser.execute_script(
        "window.sent = []; const real = fetch; fetch = (...a) => { if (a[1]?.body) sent.push(a[1].body); return real(...a); }"
    )
    limit = browser.find_element(By.ID, "limit")
    limit.clear()
    limit.send_keys("8")
    say(browser, "t40")
    until(lambda: answer(browser) and not working(browser), "an answer")
    parts = json.loads(browser.execute_script("return sent[0]"))["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"] and parts[0]["image_url"]["url"].endswith(bytes_)
    assert browser.find_element(By.CSS_SELECTOR, ".message.user img").get_attribute("alt") == "red square.png"
    assert previews(browser) == [] and errors_of(browser) == []


THINKING = """
const say = delta => "data: " + JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] }) + "\\n\\n";
const real = fetch, parts = [say({ reasoning: "Two and" }), say({ reasoning: " two." }), say({ content: "Four." }), "data: [DONE]\\n\\n"];
fetch = (...a) => String(a[0]).endsWith("completions") ? Promise.resolve(new Response(parts.join(""))) : real(...a);
"""


@pytest.mark.heavy
def test_reasoning_is_folded_and_models_without_eyes_take_no_images(browser):
    with ServerProcess.toy() as server:
        browser.get(server.where + "/")
        until(lambda: browser.find_element(By.ID, "state").text == "ready", "the server's state")
        assert not browser.find_element(By.ID, "attach").is_displayed()
        browser.execute_script(HAND_OVER, "paste", "one.png", "")
        browser.execute_script(THINKING)
        say(browser, "2 + 2?")
        until(lambda: "Four." in answer(browser) and not working(browser), "an answer")
        thoughts = browser.find_element(By.CSS_SELECTOR, ".thoughts")
        assert "Two and two." not in answer(browser) and thoughts.get_attribute("open") is None
        thoughts.find_element(By.TAG_NAME, "summary").click()
        assert "Two and two." in answer(browser) and previews(browser) == []
        assert errors_of(browser) == []


@pytest.mark.heavy
def test_a_tool_call_of_a_real_stream_is_shown_and_answered(browser, server):
    browser.get(server.where + "/")
    until(lambda: browser.find_element(By.ID, "state").text == "ready", "the server's state")
    browser.execute_script(LISTEN)
    browser.execute_script("document.getElementById('example').click()")
    fill(browser, temperature=0, choice="once", limit=120)
    say(browser, "How is the weather in Rome?")
    form = until(lambda: browser.find_elements(By.CSS_SELECTOR, ".results"), "a call")[0]
    assert (sent(browser)["tool_choice"], sent(browser)["tools"][0]["function"]["name"]) == ("required", "weather")
    assert sent(browser)["parallel_tool_calls"] is False
    assert form.find_element(By.CSS_SELECTOR, "h3 code").text == "weather"
    shown = form.find_element(By.CSS_SELECTOR, ".arguments").text
    arguments = json.loads(shown)
    assert arguments["unit"] in ("celsius", "fahrenheit") and shown == json.dumps(arguments, indent=2, ensure_ascii=False)
    box = form.find_element(By.TAG_NAME, "textarea")
    assert box.accessible_name == "Result of weather" and browser.switch_to.active_element == box
    fill(browser, choice="none")
    box.send_keys("21 degrees, clear", Keys.TAB, Keys.ENTER)
    until(lambda: answer(browser) and not working(browser), "an answer")
    asked, call, result = sent(browser)["messages"]
    assert asked["role"] == "user" and json.loads(call["tool_calls"][0]["function"]["arguments"]) == arguments
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "21 degrees, clear"}
    assert browser.find_element(By.CSS_SELECTOR, ".call .got").text == "21 degrees, clear"
    assert errors_of(browser) == []


PIECES = """
const say = delta => "data: " + JSON.stringify({ choices: [{ index: 0, delta: { tool_calls: [{ index: 0, ...delta }] } }] }) + "\\n\\n";
const real = fetch, wait = ms => new Promise(done => setTimeout(done, ms)), bytes = text => new TextEncoder().encode(text);
fetch = (...a) => String(a[0]).endsWith("completions") ? Promise.resolve(new Response(new ReadableStream({ async start(out) {
  out.enqueue(bytes(say({ id: "c1", function: { name: "rain", arguments: "" } }) + say({ function: { arguments: '{"city": "R' } })));
  await new Promise(done => { window.onwards = done; });
  out.enqueue(bytes(say({ function: { arguments: 'ome"}' } }) + "data: [DONE]\\n\\n")); out.close();
} }))) : real(...a);
"""


@pytest.mark.heavy
def test_arguments_are_shown_as_they_come(browser):
    with ServerProcess.toy() as server:
        browser.get(server.where + "/")
        browser.execute_script(PIECES)
        say(browser, "Rain?")
        shown = until(lambda: browser.find_elements(By.CSS_SELECTOR, ".arguments"), "a call")
        assert shown[0].text == '{"city": "R'
        browser.execute_script("onwards()")
        until(lambda: browser.find_elements(By.CSS_SELECTOR, ".results"), "its end")
        assert browser.find_element(By.CSS_SELECTOR, ".arguments").text == '{\n  "city": "Rome"\n}'


@pytest.mark.heavy
def test_settings_reach_the_request_and_empty_ones_are_the_servers(browser):
    with ServerProcess.toy() as server:
        browser.get(server.where + "/")
        until(lambda: browser.find_element(By.ID, "repetition_penalty").get_attribute("placeholder") == "1", "the defaults")
        browser.execute_script(LISTEN)
        say(browser, "one")
        until(lambda: answer(browser) and not working(browser), "an answer")
        numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7}
        numbers |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
        assert not numbers.keys() & sent(browser).keys() and "response_format" not in sent(browser)
        fill(browser, **numbers, stop__texts="END\n###", system="Be brief.", limit=9, tools="[oops")
        say(browser, "two")
        alert = until(lambda: browser.find_elements(By.CSS_SELECTOR, "[role=alert]"), "what is wrong")
        assert "not JSON" in alert[0].text and browser.find_element(By.ID, "tools").get_attribute("aria-invalid") == "true"
        fill(browser, tools="", form="json_schema", schema='{"type": "object"}')
        browser.find_element(By.ID, "text").clear()
        browser.execute_script("try { again() } catch {}")
        body = until(lambda: (found := sent(browser)).get("seed") and found, "the request")
        assert {name: body[name] for name in numbers} == numbers and (body["stop"], body["max_tokens"]) == (["END", "###"], 9)
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
        browser.refresh()
        assert browser.find_element(By.ID, "top_k").get_attribute("value") == "40"


FOCUS = """
const node = document.activeElement, style = getComputedStyle(node.id === "text" ? node.closest("form") : node);
return [node.id || node.localName, node.id === "text" ? style.borderTopColor : style.outlineStyle];
"""


@pytest.mark.heavy
def test_a_chat_by_keyboard_alone(browser):
    with ServerProcess.toy() as server:
        browser.get(server.where + "/")
        until(lambda: browser.find_element(By.ID, "state").text == "ready", "the server's state")
        keys = webdriver.ActionChains(browser)
        keys.send_keys("hello", Keys.ENTER).perform()
        until(lambda: "hello" in answer(browser) and not working(browser), "an answer")
        log = browser.find_element(By.ID, "log")
        assert (log.get_attribute("aria-live"), log.get_attribute("aria-busy")) == ("polite", "false")
        order = []
        while len(order) < 60:
            webdriver.ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
            name, outline = browser.execute_script(FOCUS)
            assert outline != "none", name
            order.append(name)
            if name == "theme":
                break
        wanted = ["theme", "new", "system", "limit", "temperature", "top_p", "seed", "key", "log"]
        assert [name for name in reversed(order) if name in wanted] == wanted
        before = browser.execute_script("return document.documentElement.dataset.theme")
        webdriver.ActionChains(browser).send_keys(Keys.ENTER).perform()
        assert browser.execute_script("return document.documentElement.dataset.theme") != before


CONTRAST = """
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = css => { const [r, g, b] = css.match(/[\\d.]+/g).slice(0, 3).map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = node => {
  for (; node; node = node.parentElement) {
    const css = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)|transparent/.test(css)) return css;
  }
};
return [...document.querySelectorAll("body *")].filter(node => node.checkVisibility() && node.getClientRects().length
    && [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())).map(node => {
  const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), node.outerHTML.slice(0, 120)];
}).filter(([ratio]) => ratio < 4.5);
"""


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_systems_theme_is_followed_and_can_be_read(browser, scheme):
    with ServerProcess.toy() as server:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        browser.get(server.where + "/")
        until(lambda: browser.find_element(By.ID, "state").text == "ready", "the server's state")
        assert browser.execute_script("return document.documentElement.dataset.theme") == scheme
        say(browser, "a `word` of **weight**\n")
        until(lambda: answer(browser) and not working(browser), "an answer")
        browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
        assert browser.execute_script(CONTRAST) == []
