"""The README of a chart: what its values.yaml says of each value, as a table.

Command: ``python ci/chart_readme.py CHART`` writes CHART/README.md; ``--check`` says whether that
is up to date, and writes nothing. A value without a comment that begins with ``# --``, above itself
or above the mapping that it is in, is an error.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_KEY = re.compile(r"( *)([\w.]+):.*")
_BEGIN = "<!-- values -->\n"


@dataclass(frozen=True)
class Row:
    """A value: its path, what it is by default, what is said of it."""

    path: tuple[str, ...]
    default: Any
    text: str

    @property
    def line(self) -> str:
        """A line of the table."""
        default = json.dumps(self.default, ensure_ascii=False)
        return f"| `{'.'.join(self.path)}` | `{default}` | {self.text.replace('|', '/')} |"


def comments(values: str) -> dict[tuple[str, ...], str]:
    """The text of each comment with ``# --``, by the path of the key below it."""
    found: dict[tuple[str, ...], str] = {}
    path: list[str] = []
    words: list[str] = []
    for line in values.splitlines():
        text = line.strip()
        key = _KEY.fullmatch(line)
        if text.startswith("# --"):
            words = [text.removeprefix("# --").strip()]
        elif text.startswith("#") and words:
            words.append(text.removeprefix("#").strip())
        elif key:
            path = [*path[: len(key[1]) // 2], key[2]]
            if words:
                found[tuple(path)] = " ".join(words)
            words = []
    return found


def rows(values: str) -> list[Row]:
    """The values in the order of the file; ValueError for one that nothing is said of."""
    explained = comments(values)
    found: list[Row] = []

    def walk(value: object, path: tuple[str, ...]) -> None:
        if path in explained:
            found.append(Row(path, value, explained[path]))
        elif isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, (*path, key))
        else:
            raise ValueError(f"{'.'.join(path)} has no comment — write '# -- …' above it")

    walk(yaml.safe_load(values), ())
    return found


def readme(chart: Path) -> str:
    """The README as it is to be: what stands before the table is kept."""
    table = ["| value | default | |", "|---|---|---|"]
    table += [row.line for row in rows((chart / "values.yaml").read_text(encoding="utf-8"))]
    head, found, _ = (chart / "README.md").read_text(encoding="utf-8").partition(_BEGIN)
    if not found:
        raise ValueError(f"{chart / 'README.md'} has no line {_BEGIN.strip()}")
    return head + found + "\n" + "\n".join(table) + "\n"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chart", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    file = options.chart / "README.md"
    try:
        text = readme(options.chart)
    except ValueError as error:
        sys.stderr.write(f"chart: {error}\n")
        return 1
    if not options.check:
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        sys.stderr.write(f"chart: {file} is not up to date — make chart\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
