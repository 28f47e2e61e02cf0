"""The chat command's conversation and its slash commands, and how markdown is cut while it grows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.hal.errors import RequestError
from pagoda.serving.cli.conversation import Conversation, Leave
from pagoda.serving.cli.markdown_stream import MarkdownStream, finished_blocks
from patience import eventually
from rich.console import Console


def test_turns_and_the_system_message() -> None:
    talk = Conversation(system="Be brief.")
    talk.say("hi")
    talk.hear("hello")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    talk.say("again")
    talk.hear("")
    assert len(talk.turns) == 2
    assert talk.command("/clear") == "Forgotten; the system message stays." and talk.messages == [
        {"role": "system", "content": "Be brief."}
    ]
    assert "removed" in talk.command("/system none") and talk.messages == []
    assert talk.command("/system Be kind.") and talk.command("/system") == "System message: Be kind."


def test_temperature() -> None:
    talk = Conversation()
    assert "own" in talk.command("/temp")
    assert talk.command("/temp 0.5") == "Temperature: 0.5" and talk.settings == {"temperature": 0.5}
    for wrong in ("/temp hot", "/temp -1"):
        with pytest.raises(RequestError):
            talk.command(wrong)
    assert talk.settings == {"temperature": 0.5}


def test_save(tmp_path: Path) -> None:
    talk = Conversation(system="s")
    talk.say("日本")
    talk.command(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text()) == talk.messages
    talk.command(f"/save {tmp_path / 'talk.md'}")
    assert (tmp_path / "talk.md").read_text() == "**system**\n\ns\n\n**user**\n\n日本\n\n"
    for wrong in ("/save", f"/save {tmp_path / 'absent' / 'x'}"):
        with pytest.raises(RequestError):
            talk.command(wrong)


def test_leaving_and_unknown_commands() -> None:
    talk = Conversation()
    for word in ("/quit", "/exit", "/bye"):
        with pytest.raises(Leave):
            talk.command(word)
    with pytest.raises(RequestError, match=r"no command /tmp; did you mean /temp\?"):
        talk.command("/tmp 3")
    help_text = talk.command("/help")
    assert all(command in help_text for command in ("/system", "/temp", "/clear", "/save", "/quit"))


def test_blocks_end_at_blank_lines_outside_of_fences() -> None:
    assert finished_blocks("a\n\nb") == 3
    assert finished_blocks("a\n\n") == 0  # a list might go on
    assert finished_blocks("```\nx\n\ny") == 0
    text = "```py\nx\n\n```\n\nafter"
    assert text[finished_blocks(text) :] == "after"
    assert finished_blocks("~~~\n```\n\nx") == 0


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "\n", "\n\n", "```", " ", "- b\n"]), max_size=20).map("".join), st.data())
def test_blocks_only_grow(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    assert finished_blocks(text[:cut]) <= finished_blocks(text)


async def test_everything_is_printed_once() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=60)
    text = "# Title\n\nSome **bold** text.\n\n```py\nx = 1\n\ny = 2\n```\n\nThe end."
    with MarkdownStream(console) as stream:
        for end in range(len(text)):
            stream._drawn = 0.0
            stream.update(text[:end])
        stream.update(text)
    shown = out.getvalue()
    for part in ("Title", "Some bold text.", "x = 1", "y = 2", "The end."):
        assert shown.count(part) == 1, shown


async def test_text_that_came_soon_after_a_drawing_is_drawn_without_more_of_it() -> None:
    out = io.StringIO()
    with MarkdownStream(Console(file=out, force_terminal=True, width=60)) as stream:
        stream.update("first")
        stream.update("first second")
        assert "second" not in out.getvalue()
        await eventually(lambda: "second" in out.getvalue(), "for the drawing that was due")
