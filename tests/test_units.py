"""Claims about reading and writing sizes, durations and booleans."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_nixl.errors import SettingsError
from hicache_nixl.units import (
    MAX_SIZE,
    describe,
    format_duration,
    format_size,
    parse_bool,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("7B", 7),
        ("256MiB", 256 << 20),
        ("2TiB", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        (" 64 kib ", 64 << 10),
        ("64Ki", 64 << 10),
        ("64kB", 64_000),
        ("2GB", 2_000_000_000),
        ("1PiB", 1 << 50),
        (MAX_SIZE, (1 << 63) - 1),
    ],
)
def test_sizes_are_read(text: object, size: int) -> None:
    """Plain numbers are bytes; binary units count in 1024 and decimal ones in 1000."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "value",
    [
        "",
        "MiB",
        "-1",
        -1,
        "-5MiB",
        "nan",
        math.nan,
        math.inf,
        "inf",
        1.5,
        "1.5",
        "0.3KiB",
        "1e9",
        "1_000",
        "1,5GiB",
        "12 parsecs",
        "1MiB 2KiB",
        "\u0661MiB",
        "8EiB",
        1 << 63,
        1 << 5000,
        "9" * 10_000,
        True,
        None,
        [1],
        {"bytes": 1},
    ],
)
def test_what_is_no_size_is_refused(value: object) -> None:
    """Anything that is not a whole, non-negative number of bytes is one line with an example."""
    with pytest.raises(SettingsError, match=r'^[^\n]* "256MiB"[^\n]*$'):
        parse_size(value)


@pytest.mark.parametrize("text", ["64k", "64K", "1.5G", "2T"])
def test_bare_letters_are_ambiguous(text: str) -> None:
    """A size in a bare letter is refused with both readings spelled out."""
    number, letter = text[:-1], text[-1].upper()
    with pytest.raises(SettingsError, match=f'"{number}{letter}iB".*"{number}{letter}B"'):
        parse_size(text)


@pytest.mark.parametrize("value", [0, "0", "0GiB", "1023KiB"])
def test_minimum_size_holds(value: object) -> None:
    """A size below the minimum is refused with the value and the minimum."""
    with pytest.raises(SettingsError, match=f"{value}.*below the minimum of 1MiB"):
        parse_size(value, minimum=1 << 20)


@given(st.integers(0, MAX_SIZE))
def test_sizes_round_trip(size: int) -> None:
    """Every size is read back exactly from its text."""
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("size", "digits", "text"),
    [
        (0, None, "0B"),
        (1023, None, "1023B"),
        (1 << 20, None, "1MiB"),
        (3 << 29, None, "1536MiB"),
        (3 << 29, 1, "1.5GiB"),
        ((1 << 40) + 1, 2, "1.00TiB"),
        (500, 1, "500B"),
    ],
)
def test_sizes_are_written(size: int, digits: int | None, text: str) -> None:
    """Sizes are written exactly, or rounded to the digits asked for."""
    assert format_size(size, digits=digits) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("250us", 0.00025),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1.5 S", 1.5),
        ("10", 10.0),
        (10, 10.0),
        (0.25, 0.25),
    ],
)
def test_durations_are_read(text: object, seconds: float) -> None:
    """Plain numbers are seconds; units are us, ms, s, m and h."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value",
    [
        *("", "s", "-1s", "nan", "inf", "1e3", "5 years", "1m30s", "0", "0ms"),
        *(0, -1, 0.0, math.nan, math.inf, -math.inf, 10**400, True, None, [1], "601s", 600.1),
    ],
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    """Anything not finite, above zero and within the maximum is one line with an example."""
    with pytest.raises(SettingsError, match=r'^[^\n]* "30s"[^\n]*$'):
        parse_duration(value, maximum=600.0)


@given(st.floats(min_value=0, exclude_min=True, max_value=1e30))
def test_durations_round_trip(seconds: float) -> None:
    """Every duration is read back exactly from its text."""
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (10.0, "10s"), (0.5, "500ms"), (120.0, "2m"), (90.0, "90s"), (7200.0, "2h")],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    """Durations are written in the unit that reads best."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        *[(value, True) for value in (True, 1, "true", "True", "TRUE", "1", "yes", "y", "on")],
        *[(value, False) for value in (False, 0, "false", "False", "0", " no ", "n", "off")],
    ],
)
def test_booleans_are_read(value: object, truth: bool) -> None:
    """Booleans are read as JSON, as text and as SGLang's environment writes them."""
    assert parse_bool(value) is truth


@pytest.mark.parametrize("value", ["", "maybe", "2", 2, -1, 1.0, None, [True]])
def test_what_is_no_boolean_is_refused(value: object) -> None:
    """Anything else is one line that names true and false."""
    with pytest.raises(SettingsError, match=r"^[^\n]*write true or false$"):
        parse_bool(value)


@pytest.mark.parametrize(
    "value", ["my-token-abc", "PASSWORD=abc", {"a": "abc"}, ["abc"], "x" * 81 + "abc", b"abc"]
)
def test_messages_show_nothing_private(value: object) -> None:
    """Containers, long texts and texts that mention a credential are never printed."""
    assert "abc" not in describe(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [("two\nlines", r"'two\nlines'"), (True, "true"), (None, "null"), (7, "7"), (1.5, "1.5")],
)
def test_values_are_shown_on_one_line(value: object, text: str) -> None:
    """A value is shown the way JSON or Python writes it, line breaks escaped."""
    assert describe(value) == text
