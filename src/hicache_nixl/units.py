"""Readable scalars: byte sizes, durations and booleans, to text and back.

This module owns the grammar. It must not know any setting.

Sizes are whole bytes. `KiB MiB GiB TiB PiB EiB` (or `Ki Mi ...`) count in 1024, `kB MB GB TB PB EB`
in 1000, in any case. A bare letter, "64k", is refused: tools disagree on what it means.
Durations are seconds: `us ms s m h`, a plain number is seconds. Arithmetic is decimal, so exact.

Every function raises `SettingsError` with one line that names the value and a good example.
"""

import math
import re
from decimal import Decimal

from hicache_nixl.errors import SettingsError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
# SQLite integers and NIXL offsets are signed 64-bit.
MAX_SIZE = (1 << 63) - 1

_BINARY: dict[str, int] = {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGTPE", start=1)
}
_SIZE_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{unit.lower(): factor for unit, factor in _BINARY.items()},
    **{unit[:2].lower(): factor for unit, factor in _BINARY.items()},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtpe", start=1)},
}
_DURATION_UNITS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "": Decimal(1),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_NUMBER_AND_UNIT = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,400})?)\s*([A-Za-z]*)", re.ASCII)
_TRUE = frozenset({"true", "1", "yes", "y", "on"})
_FALSE = frozenset({"false", "0", "no", "n", "off"})

_SIZE_HINT = 'write for example "256MiB", or a whole number of bytes'
_DURATION_HINT = 'write for example "30s" or "500ms", or a number of seconds'
_SECRET_TEXT = re.compile(r"secret|token|passw|credential|key", re.IGNORECASE)


def describe(value: object) -> str:
    """`value` for a message: one short line that gives away no credential.

    Containers are named, not printed, and so is text that is long or mentions a credential:
    either may carry somebody's secret.
    """
    if isinstance(value, str):
        if _SECRET_TEXT.search(value):
            return "the given text"
        return repr(value) if len(value) <= 80 else f"a text of {len(value)} characters"
    if value is None or isinstance(value, bool | float):
        return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 256 else "a huge number"
    return f"a {type(value).__name__}"


def parse_size(value: object, *, minimum: int = 0) -> int:
    """Bytes in `value`, an int or a text such as "1.5GiB"; at least `minimum` bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        size = _size_from_text(value)
    else:
        raise SettingsError(f"{describe(value)} is not a byte size; {_SIZE_HINT}")
    if size < minimum:
        raise SettingsError(
            f"{describe(value)} is below the minimum of {format_size(minimum)}; {_SIZE_HINT}"
        )
    if size > MAX_SIZE:
        raise SettingsError(f"{describe(value)} is more than 8 EiB; {_SIZE_HINT}")
    return size


def _size_from_text(text: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{describe(text)} is not a byte size; {_SIZE_HINT}")
    number, unit = match.groups()
    if len(unit) == 1 and unit in "kKmMgGtTpPeE":
        letter = unit.upper()
        raise SettingsError(
            f'{describe(text)} is ambiguous; write "{number}{letter}iB" (1024) or '
            f'"{number}{letter}B" (1000)'
        )
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        raise SettingsError(f"{describe(text)} has no known unit; {_SIZE_HINT}")
    whole, _, fraction = number.partition(".")
    scale: int = 10 ** len(fraction)
    size, rest = divmod(int(whole + fraction) * factor, scale)
    if rest:
        raise SettingsError(f"{describe(text)} is not a whole number of bytes; {_SIZE_HINT}")
    return size


def format_size(size: int, *, digits: int | None = None) -> str:
    """`size` bytes as text. Exact by default; `digits` decimals of the largest unit for people.

    >>> format_size(1536 << 20)
    '1536MiB'
    >>> format_size(1536 << 20, digits=1)
    '1.5GiB'
    """
    if size < 0:
        raise SettingsError(f"{size} is not a byte size; {_SIZE_HINT}")
    for unit, factor in reversed(_BINARY.items()):
        if digits is not None and size >= factor:
            return f"{size / factor:.{digits}f}{unit}"
        if digits is None and size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def parse_duration(value: object, *, maximum: float = math.inf) -> float:
    """Seconds in `value`, a number or a text such as "500ms"; above 0, at most `maximum`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    elif isinstance(value, str):
        seconds = _duration_from_text(value)
    else:
        raise SettingsError(f"{describe(value)} is not a duration; {_DURATION_HINT}")
    if not math.isfinite(seconds):
        raise SettingsError(f"{describe(value)} is not a finite duration; {_DURATION_HINT}")
    if seconds <= 0:
        raise SettingsError(f"{describe(value)} is not above zero; {_DURATION_HINT}")
    if seconds > maximum:
        raise SettingsError(
            f"{describe(value)} is above the maximum of {format_duration(maximum)}; "
            f"{_DURATION_HINT}"
        )
    return seconds


def _duration_from_text(text: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{describe(text)} is not a duration; {_DURATION_HINT}")
    number, unit = match.groups()
    factor = _DURATION_UNITS.get(unit.lower())
    if factor is None:
        raise SettingsError(f"{describe(text)} has no known unit; {_DURATION_HINT}")
    return float(Decimal(number) * factor)


def format_duration(seconds: float) -> str:
    """`seconds` as exact text in the unit that reads best, "10s", "500ms", "2m"."""
    if not math.isfinite(seconds) or seconds < 0:
        raise SettingsError(f"{seconds} is not a duration; {_DURATION_HINT}")
    exact = Decimal(repr(seconds))
    unit = "s"
    counts = 0 < seconds < 1e12  # beyond, decimals are no longer exact
    if counts and exact % 3600 == 0:
        exact, unit = exact / 3600, "h"
    elif counts and exact % 60 == 0:
        exact, unit = exact / 60, "m"
    elif 0 < seconds < 1:
        exact, unit = exact * 1000, "ms"
    text = f"{exact:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def parse_bool(value: object) -> bool:
    """True or False from a boolean, 0, 1, or a text such as "true", "False", "yes", "0"."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SettingsError(f"{describe(value)} is not a boolean; write true or false")
