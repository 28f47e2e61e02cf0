"""docs/parity/blocks: every kind of native block has a row, every mixer was compared in each way, and the page is what the figures say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pagoda.models import spec as records
from pagoda.models.recurrent import Recurrent

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> Any:
    sys.path.insert(0, str(ROOT / "ci"))
    try:
        import block_table

        yield block_table
    finally:
        sys.path.remove(str(ROOT / "ci"))


def test_every_kind_was_compared_and_agrees(table: Any) -> None:
    document = json.loads(table.TARGET.read_text())
    found = {(row["section"], row["kind"]): row for row in document["blocks"]}
    assert set(found) == {(section, kind.name) for section, kinds in table.SECTIONS.items() for kind in kinds}
    red = [(key, way) for key, row in found.items() for way in ("tp 2", *table.WAYS) if way in row and not row[way]["passed"]]
    assert not red
    assert all(
        set(table.WAYS) <= set(found[section, kind.name])
        for section, kinds in table.SECTIONS.items()
        for kind in kinds
        if kind in table.MIXERS
    )
    assert table.PAGE.read_text() == table.page(document)


def test_every_record_of_a_mixer_and_of_a_feed_forward_is_in_a_kind(table: Any) -> None:
    """A spec that holds nothing but the record has some kind."""
    kinds = [kind for kinds in table.SECTIONS.values() for kind in kinds]
    wanted = {*get_args(records.Mixer), *get_args(Recurrent), records.Mlp, records.Moe} - {Recurrent}
    named = {cell for kind in kinds for cell in _records_in(kind.there)}
    assert {one for one in wanted if isinstance(one, type)} <= named


def _records_in(test: Any) -> set[type]:
    """Classes that a test looks for, in itself and in the tests that it calls."""
    cells = [cell.cell_contents for cell in test.__closure__ or ()]
    reached = [test.__globals__[name] for name in test.__code__.co_names if name in test.__globals__]
    inner = [one for one in (*cells, *reached) if callable(one) and hasattr(one, "__code__") and one is not test]
    return {one for one in (*cells, *reached) if isinstance(one, type)} | {kind for one in inner for kind in _records_in(one)}
