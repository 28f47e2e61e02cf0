"""The `pagoda` command: finds the module of a command, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from pagoda import __version__
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.serving.cli import help_text


class Command(NamedTuple):
    """A command's module, loaded when it is called, and its line in `pagoda --help`.

    The module has `run(argv) -> int`, or a function for typer named `function`.
    """

    module: str
    summary: str
    function: str = "run"


SECTIONS: dict[str, dict[str, Command]] = {
    "Serve and talk": {
        "serve": Command("serve", "Serve a model over HTTP: OpenAI's API and more."),
        "run-batch": Command("run_batch", "Answer a file of requests in OpenAI's batch format."),
        "generate": Command("generate", "Complete a prompt, or standard input, and print it as it comes."),
        "chat": Command("chat", "Talk to a model in the terminal, here or on a running server."),
    },
    "Models": {
        "pull": Command("pull", "Fetch a model of the hub into the cache.", "pull"),
        "models": Command("models", "The architectures that this build serves, and what parity says of them.", "models"),
        "list": Command("list_models", "The models on this machine, with their sizes.", "list_models"),
        "rm": Command("remove", "Delete a model from the cache.", "remove"),
        "kernels": Command("kernels", "Compile kernels ahead of a start, or fetch compiled ones; list and clear them."),
    },
    "Understand": {
        "plan": Command("plan", "Where memory will go and which kernels will run, before anything loads."),
        "devices": Command("devices", "What there is to run on, and what each device can do.", "devices"),
        "conformance": Command("conformance", "Hold a device to the contract, level by level, and write the report.", "conformance"),
        "export": Command("export", "Write a model's step as an ONNX graph for other runtimes.", "export"),
        "diff": Command("diff", "Run a model on two devices and name the layer and primitive where they part.", "diff"),
        "parity": Command("parity", "Compare this build with recorded answers of tiny checkpoints.", "parity"),
        "collect-env": Command("collect_env", "Versions, machine and devices, for a bug report."),
        "bench": Command("bench.command", "Measure latency, throughput, start-up, or a running server under load."),
    },
}
ALIASES = {"download-kernels": ["kernels", "fetch"]}
"""What others call a command."""
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}

EXIT_ERROR, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. `--debug` anywhere shows tracebacks."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if debug:
        words.remove("--debug")
    try:
        return _dispatch(words)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else EXIT_ERROR if done.code else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left: nobody is there to be told
        return EXIT_ERROR
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"pagoda: {_told(error)}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print("\n".join(_overview()))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"pagoda {__version__}")
        return 0
    name, *rest = ALIASES.get(words[0].replace("_", "-"), words[:1]) + words[1:]
    command = COMMANDS.get(name.replace("_", "-"))
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(f"no command {name!r}; " + (f"did you mean {near[0]}?" if near else "see pagoda --help"))
    module = import_module(f"pagoda.serving.cli.{command.module}")
    if command.function == "run":
        return int(module.run(rest) or 0)
    typer_bridge = import_module("pagoda.serving.cli.typer_bridge")
    return int(typer_bridge.run(name, getattr(module, command.function), rest))


def _overview() -> list[str]:
    lines = [help_text.bold("pagoda COMMAND [options]"), "", "Serves large language models on any accelerator."]
    for title, commands in SECTIONS.items():
        lines += ["", help_text.bold(title), *help_text.rows([(name, command.summary) for name, command in commands.items()], 16)]
    return [*lines, "", "`pagoda COMMAND --help` lists a command's options; --debug shows the traceback of an error."]


def _told(error: Exception) -> str:
    if isinstance(error, PagodaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback"


if __name__ == "__main__":
    sys.exit(main())
