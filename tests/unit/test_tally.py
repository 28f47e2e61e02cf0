"""What several API processes count together."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.tally import Tally


def test_rows_add_up_and_a_row_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "tally"
    Tally.make(path, 3)
    first, last = Tally(path, 0, 3), Tally(path, 2, 3)
    first.write(1, 10, 2)
    last.write(4, 40, 5)
    assert (first.queued, first.tokens, first.running) == (last.queued, last.tokens, last.running) == (5, 50, 7)
    first.clear(2)
    assert (last.queued, last.tokens, last.running) == (1, 10, 2)
    last.write(1, 1, 1)
    Tally(path, 2, 3)  # its successor begins with nothing
    assert first.running == 2


def test_one_process_counts_for_itself() -> None:
    one, other = Tally(), Tally()
    one.write(1, 2, 3)
    assert (one.queued, one.tokens, one.running) == (1, 2, 3) and other.running == 0


def test_there_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="api_server_count=0"):
        ServerConfig(api_server_count=0)
