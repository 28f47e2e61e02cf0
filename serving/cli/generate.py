"""`pagoda generate`: complete one prompt and print it as it comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import pagoda  # its SDK loads on first use, so that --help and --url stay quick
from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.talk import Answer, LocalTalker
from pagoda.serving.cli.words import SamplingOptions, sampling_settings
from pagoda.serving.engine.config import EngineConfig, Flag
from pagoda.serving.loop_thread import LoopThread


@dataclass(frozen=True)
class GenerateOptions:
    """Of `pagoda generate`."""

    chat: Annotated[bool, Flag("Send the prompt as a chat message, through the model's template.", section="Prompt")] = False
    quiet: Annotated[bool, Flag("Do not print the line about speed.")] = False


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "generate", "Complete a prompt, or standard input, and print the answer as it comes.", "[MODEL] [PROMPT] [options]", words=2
    )
    for config in (GenerateOptions, SamplingOptions, EngineConfig):
        parser.add_config(config)
    parser.add_config_file()
    values = with_prompt(parser.values(argv))
    prompt = values.pop("prompt") or sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("there is no prompt: give one, or pipe one into standard input")
    thread = LoopThread()
    try:
        answer = thread.run(_generate(build(EngineConfig, values), build(GenerateOptions, values), prompt, sampling_settings(values)))
    finally:
        thread.stop()
    if not values.get("quiet"):
        print(answer.line(), file=sys.stderr)
    return 0


def with_prompt(values: dict[str, Any]) -> dict[str, Any]:
    """One word is the prompt, two are model and prompt; "-" and none mean standard input."""
    *model, prompt = values.pop("words", [None])
    if model and values.get("model", model[0]) != model[0]:
        raise ConfigError(f"two models are named: {model[0]!r} and --model {values['model']!r}; name one")
    return values | ({"model": model[0]} if model else {}) | {"prompt": None if prompt == "-" else prompt}


async def _generate(config: EngineConfig, options: GenerateOptions, prompt: str, settings: dict[str, Any]) -> Answer:
    async with AsyncExitStack() as stack:
        talker = LocalTalker(await stack.enter_async_context(pagoda.AsyncLLM(**vars(config))))
        answers = talker.chat([{"role": "user", "content": prompt}], settings) if options.chat else talker.complete(prompt, settings)
        answer, printed = Answer(), 0
        async with aclosing(answers) as closing:  # type: ignore[type-var]
            async for answer in closing:
                print(answer.text[printed:], end="", flush=True)
                printed = len(answer.text)
        print(flush=True)
        return answer
