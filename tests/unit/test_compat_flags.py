"""Flags and fields of `vllm serve`: every one is the same here, accepted, or refused by its name with what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.openai.unsupported import REFUSED, refuse_unsupported
from pagoda.serving.cli.compat import FLAGS, Foreign
from pagoda.serving.cli.serve_run import options
from pagoda.serving.frontend.generation_config import server_defaults

FACTS = Path(__file__).resolve().parents[3] / "shared/design/peer-facts.md"
OWN = {name for section in options().sections.values() for option in section for name in option.names}
LEFT = [(name, flag) for flag in FLAGS for name in flag.names if name not in OWN]


def words(name: str, flag: Foreign, value: str) -> list[str]:
    if flag.switch:
        return [name if value == "on" else f"--no-{name[2:]}"]
    return [f"{name}{value}"] if name == "-O" else [name, value]


@pytest.mark.parametrize(("name", "flag"), LEFT, ids=[name for name, _ in LEFT])
def test_a_flag_is_accepted_for_what_happens_anyway_and_refused_by_name_otherwise(name: str, flag: Foreign) -> None:
    short = flag.switch and not name.startswith("--")
    for value in flag.same:
        if value != "*" and not (short and value == "off"):
            assert options().values(words(name, flag, value)) == {}
    if "*" in flag.same:
        assert options().values([name, "anything"]) == {}
        return
    for other in {"on", "off"} - set(flag.same) - set(flag.stands) if flag.switch else {"something-else"}:
        if short and other == "off":
            continue
        with pytest.raises(ConfigError, match=re.escape(name if other != "off" else f"--no-{name[2:]}")) as raised:
            options().values(words(name, flag, other))
        assert (flag.instead or "nothing like it in this release") in str(raised.value)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        (["--enforce-eager"], "none"),
        (["--no-enforce-eager"], None),
        (["-cc", '{"cudagraph_mode": "PIECEWISE"}'], "piecewise"),
        (["--compilation-config", "{}"], None),
        (["-cc.cudagraph_mode", "FULL_DECODE_ONLY"], "full"),
        (["-cc.cudagraph_mode=NONE"], "none"),
        (["--compilation-config.cudagraph_mode", "FULL_AND_PIECEWISE"], "full"),
        (["--graphs", "piecewise"], "piecewise"),
    ],
)
def test_what_is_captured_may_be_said_in_the_peers_words(given: list[str], mode: str | None) -> None:
    assert options().values(given) == ({} if mode is None else {"graphs": mode})


def test_a_compilation_configuration_with_more_is_refused() -> None:
    with pytest.raises(ConfigError, match="--graphs full, piecewise or none"):
        options().values(["-cc", '{"cudagraph_mode": "NONE", "level": 3}'])


def test_every_flag_of_the_peers_table_is_known() -> None:
    table = FACTS.read_text().split("#### 2.4a", 1)[1].split("#### 2.4b", 1)[0]
    names = {
        name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"(?<!\S)--?[a-zA-Z][a-z0-9-]*", _cell(line))
    }
    assert len(names) > 140
    assert sorted(names - OWN - {name for flag in FLAGS for name in flag.names}) == []


def _cell(line: str) -> str:
    """The first column with the tails of "--a-size-local / -rank" spelled out."""
    cell = line.split("|")[1].replace("`", "").replace("(", " ").replace(",", " ")
    for stem, tails in {
        "data-parallel": ("-rank", "-start-rank", "-rpc-port", "-backend", "-hybrid-lb", "-multi-port-external-lb"),
        "video-pruning": ("-method",),
    }.items():
        for tail in tails:
            cell = cell.replace(f"/ {tail}", f"/ --{stem}{tail}")
    return cell.replace("-model/-tokens", " --spec-model --spec-tokens")


def test_a_json_flag_with_a_dot_is_told_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"""--compilation-config '\{"mode": …\}'"""):
        options().values(["--compilation-config.mode", "3"])


def test_help_and_suggestions_know_pagodas_own_flags_alone() -> None:
    assert "--enable-dbo" not in options().format_help()
    with pytest.raises(ConfigError, match="did you mean --max-num-seqs"):
        options().values(["--max-num-seq", "3"])


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_served_is_refused_by_its_name(name: str) -> None:
    request = ChatRequest(messages=[])
    if name not in ChatRequest.__struct_fields__:
        return
    setattr(request, name, {"x": 1})
    with pytest.raises(RequestError, match=name):
        refuse_unsupported(request)


def test_sampling_defaults_come_from_the_checkpoint_a_folder_or_nowhere_and_are_overridden(tmp_path: Path) -> None:
    checkpoint, other = tmp_path / "checkpoint", tmp_path / "other"
    for folder, temperature in ((checkpoint, 0.3), (other, 0.9)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(f'{{"temperature": {temperature}, "top_k": 5}}')
    assert server_defaults(checkpoint, "auto", {}) == {"temperature": 0.3, "top_k": 5}
    assert server_defaults(checkpoint, str(other), {"top_k": 7}) == {"temperature": 0.9, "top_k": 7}
    assert server_defaults(checkpoint, "vllm", {"max_new_tokens": 9}) == {"max_tokens": 9}
    with pytest.raises(ConfigError, match="no setting 'heat'"):
        server_defaults(checkpoint, "auto", {"heat": 1})
    with pytest.raises(ConfigError, match="no generation_config"):
        server_defaults(checkpoint, str(tmp_path), {})
