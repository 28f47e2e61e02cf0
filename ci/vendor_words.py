"""No vendor word above the contract: fails where models, quant or serving name a vendor in code (comments and docstrings may)."""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("models", "quant", "serving")
EXEMPT = frozenset({"serving/cli/compat.py"})
"""The one file of compatible flag names."""
WORD = re.compile(r"(?<![A-Za-z])(cuda|hip|xpu|hpu|npu|mps|xla)(?![A-Za-z])|device(_type|\.type)\s*(==|in\b)", re.IGNORECASE)

CODE = (tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def offences(path: Path) -> list[str]:
    found = []
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        docstring = token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)
        if token.type in CODE and not docstring and WORD.search(token.string):
            found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.line.strip()}")
        if token.type != tokenize.COMMENT:
            previous = token.type
    return found


def main() -> int:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found = [line for path in paths if str(path.relative_to(ROOT)) not in EXEMPT for line in offences(path)]
    print("\n".join(found) if found else f"no vendor word in {len(paths)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
