"""The command itself: help, lazy loading, one-line errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from pagoda import __version__
from pagoda.hal.errors import ConfigError, DeviceError
from pagoda.serving.cli import main as cli


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    return code, *capsys.readouterr()


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--help",), ("-h",)):
        code, out, _ = run(capsys, *words)
        assert code == 0 and all(f"  {name} " in out for name in cli.COMMANDS)


def test_every_command_has_its_module_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in cli.COMMANDS.items():
        assert callable(getattr(import_module(f"pagoda.serving.cli.{command.module}"), command.function))
        code, out, _ = run(capsys, name, "--help")
        assert code == 0 and f"pagoda {name}" in out, name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"pagoda {__version__}\n", "")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "devcies") == (2, "", "pagoda: no command 'devcies'; did you mean devices?\n")
    assert run(capsys, "xyzzy") == (2, "", "pagoda: no command 'xyzzy'; see pagoda --help\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("max_num_seqs=0 must be at least 1"), 2, "pagoda: max_num_seqs=0 must be at least 1"),
        (DeviceError("no such device 'x'"), 1, "pagoda: no such device 'x'"),
        (OSError(98, "Address already in use"), 1, "pagoda: Address already in use"),
        (FileNotFoundError(2, "No such file", "f.json"), 1, "pagoda: No such file: f.json"),
        (ValueError("odd"), 1, "pagoda: unexpected ValueError: odd; run again with --debug for the traceback"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert run(capsys, "serve") == (code, "", line + "\n" if line else "")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--debug", "devcies")
    assert code == 2 and err.startswith("Traceback") and err.endswith("did you mean devices?\n")


def test_usage_errors_of_typer_commands_are_config_errors(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "devices", "--nope")
    assert (code, err) == (2, "pagoda: No such option: --nope; see pagoda devices --help\n")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pagoda.serving.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'numpy', 'typer', 'rich', 'starlette', 'tokenizers'}; print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
