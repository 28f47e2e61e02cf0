"""`pagoda chat`: talk to a model in the terminal, one in this process or one on a running server."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import pagoda  # its SDK loads on first use, so that --help and --url stay quick
from pagoda.hal.errors import PagodaError
from pagoda.serving.cli.conversation import Conversation, Leave
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.markdown_stream import MarkdownStream
from pagoda.serving.cli.remote import connect
from pagoda.serving.cli.talk import Answer, LocalTalker, RemoteTalker, Talker
from pagoda.serving.cli.words import SamplingOptions, sampling_settings, with_model
from pagoda.serving.engine.config import EngineConfig, Flag
from pagoda.serving.loop_thread import LoopThread
from rich.console import Console

try:
    import readline  # line editing and history
except ImportError:  # not on Windows
    readline = None  # type: ignore[assignment]


@dataclass(frozen=True)
class ChatOptions:
    """Of `pagoda chat`."""

    url: Annotated[str | None, Flag("Talk to a running server instead of loading a model here.", section="Conversation")] = None
    api_key: Annotated[str | None, Flag("Bearer token for the server.")] = None
    system: Annotated[str | None, Flag("System message.")] = None


def run(argv: Sequence[str]) -> int:
    parser = Parser("chat", "Talk to a model in the terminal. /help lists what can be typed there.", "[MODEL] [options]", words=1)
    parser.add_config(ChatOptions)
    parser.add_config(SamplingOptions)
    parser.add_config(EngineConfig)
    parser.add_config_file()
    values = with_model(parser.values(argv))
    options = build(ChatOptions, values)
    chat = Chat(Conversation(sampling_settings(values), options.system))
    thread, stack = LoopThread(), AsyncExitStack()
    try:
        if options.url is None and sys.stderr.isatty():
            # a plain line: a spinner would fight with the line that shows how far loading is
            print(f"Loading {values.get('model', EngineConfig.model)} …", file=sys.stderr)
        talker = thread.run(open_talker(stack, options.url, options.api_key, values))
        return chat.run(talker, thread)
    finally:
        thread.run(stack.aclose())
        thread.stop()


async def open_talker(stack: AsyncExitStack, url: str | None, api_key: str | None, values: dict[str, Any]) -> Talker:
    """Load the model, or connect to the server; `stack` ends it."""
    if url is None:
        config = build(EngineConfig, values)
        return LocalTalker(await stack.enter_async_context(pagoda.AsyncLLM(**vars(config))))
    remote = await stack.enter_async_context(connect(url, api_key))
    return RemoteTalker(remote, values.get("model") or (await remote.models())[0]["id"])


class Chat:
    """The terminal side: reads lines, shows answers. Plain text where standard output is no terminal."""

    def __init__(self, conversation: Conversation, read: Callable[[str], str] = input) -> None:
        self.conversation = conversation
        self._read = read
        self._console = Console(highlight=False)
        self._talks = sys.stdin.isatty() or read is not input

    def run(self, talker: Talker, thread: LoopThread) -> int:
        """Until the user leaves; a text piped in is one message."""
        if not self._talks:
            self._ask(sys.stdin.read().strip(), talker, thread)
            return 0
        self._tell(f"{talker.name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        while True:
            try:
                line = self._line()
                if line.startswith("/"):
                    self._tell(self.conversation.command(line))
                elif line:
                    self._ask(line, talker, thread)
            except (Leave, EOFError):
                return 0
            except KeyboardInterrupt:
                self._tell("(Ctrl-D leaves)")
            except PagodaError as error:
                self._tell(f"{error}", "red")

    def _line(self) -> str:
        lines = [self._read(self._prompt("› "))]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read(self._prompt("… ")))
        return "\n".join(lines).strip()

    def _prompt(self, mark: str) -> str:
        # readline must be told which characters take no room
        return f"\001\033[1;36m\002{mark}\001\033[0m\002" if self._console.is_terminal and readline is not None else mark

    def _ask(self, text: str, talker: Talker, thread: LoopThread) -> None:
        self.conversation.say(text)
        answer = Answer()
        try:
            thread.run(self._show(talker.chat(self.conversation.messages, self.conversation.settings), answer))
        except KeyboardInterrupt:
            answer.finish_reason = "abort"
        finally:
            self.conversation.hear(answer.text)
        self._tell(answer.line() + (", stopped" if answer.finish_reason == "abort" else "") + "\n" * self._console.is_terminal)

    async def _show(self, answers: AsyncGenerator[Answer, None], shown: Answer) -> None:
        if not self._console.is_terminal:
            await self._show_plain(answers, shown)
            return
        with MarkdownStream(self._console) as stream:
            async with aclosing(answers) as closing:
                async for answer in closing:
                    vars(shown).update(vars(answer))
                    stream.update(answer.text)

    async def _show_plain(self, answers: AsyncGenerator[Answer, None], shown: Answer) -> None:
        printed = 0
        async with aclosing(answers) as closing:
            async for answer in closing:
                vars(shown).update(vars(answer))
                print(answer.text[printed:], end="", flush=True)
                printed = len(answer.text)
        print(flush=True)

    def _tell(self, text: str, style: str = "dim") -> None:
        # what is not the answer does not belong into a pipe
        (self._console if self._console.is_terminal else Console(stderr=True, highlight=False)).print(text, style=style, markup=False)
