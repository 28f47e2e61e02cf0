"""Stop strings against a character-by-character reading, whatever the chunks."""

from hypothesis import given
from hypothesis import strategies as st
from pagoda.serving.frontend.stop import StopStrings


def naive(text, stops, include):
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def scan(chunks, stops, include):
    scanner, out = StopStrings(stops, include=include), ""
    for chunk in chunks:
        text, stop = scanner.push(chunk)
        out += text
        if stop is not None:
            return out, stop
    return out + scanner.release(), None


texts = st.text("abc", max_size=12)


@given(st.lists(texts, max_size=6), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3, unique=True), st.booleans())
def test_chunks_do_not_matter(chunks, stops, include):
    assert scan(chunks, tuple(stops), include) == naive("".join(chunks), stops, include)


def test_only_what_may_become_a_stop_is_held():
    scanner = StopStrings(("</end>",))
    assert scanner.push("hello <") == ("hello ", None)
    assert scanner.push("b> and </") == ("<b> and ", None)
    assert scanner.push("end> never") == ("", "</end>")


def test_release_gives_what_was_held():
    scanner = StopStrings(("stop",))
    scanner.push("st")
    assert scanner.release("op") == "stop"
    assert scanner.push("!") == ("!", None)
