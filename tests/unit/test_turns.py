"""Short turns on the processors: asked for, inherited and given back by threads, and nothing at all where there are none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from pagoda.serving.engine import turns


def test_a_thread_asks_and_its_children_inherit() -> None:
    def ask() -> tuple[int, bool, int, int, bool, int]:
        usual, took, short = turns.turn_ns(), turns.take_short_turns(), turns.turn_ns()
        with ThreadPoolExecutor(1) as child:
            inherited = child.submit(turns.turn_ns).result()
        return usual, took, short, inherited, turns.take_usual_turns(), turns.turn_ns()

    with ThreadPoolExecutor(1) as thread:
        usual, took, short, inherited, gave, last = thread.submit(ask).result()
    assert last == usual and inherited == short
    assert short == turns.SHORT_NS if took and usual else short == usual
    assert took == gave


def test_elsewhere_nothing_is_asked(monkeypatch) -> None:
    monkeypatch.setattr(turns.platform, "machine", lambda: "abacus")
    assert not turns.take_short_turns() and not turns.take_usual_turns() and turns.turn_ns() == 0
