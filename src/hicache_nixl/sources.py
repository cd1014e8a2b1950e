"""What every source of settings shares: where a value came from, name matching, file reading.

This module owns reading a settings file into a mapping and the words of a complaint about a key.
It must not know which keys exist, and never prints a value.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hicache_nixl.errors import SettingsError

ENVIRONMENT = "environment"

_CREDENTIAL = re.compile(
    r"secret|token|passw|passphrase|credential|signature|connection_?string|(^|_)sas(_|$)"
    r"|(access|api|private|account|shared|client|encryption)_?key",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Given:
    """A value for a setting: the key it was written under, and the source it was written in."""

    setting: str
    value: Any = field(repr=False)
    key: str
    source: str

    @property
    def origin(self) -> str:
        """The key and its source, for messages."""
        if self.source == ENVIRONMENT:
            return f"environment variable {self.key}"
        return f"{self.key} ({self.source})"


def looks_like_credential(key: str) -> bool:
    """Whether a key of this name would hold a secret."""
    return _CREDENTIAL.search(key.replace("-", "_")) is not None


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known name most like `key`, or None when none is close."""
    matches = difflib.get_close_matches(key.lower().replace("-", "_"), list(known), n=1)
    return matches[0] if matches else None


def unknown_key(
    key: object,
    source: str,
    known: Iterable[str],
    *,
    listed: Iterable[str] | None = None,
    prefix: str = "",
    spell: Callable[[str], str] = str,
) -> SettingsError:
    """The error for a key nobody reads: it names the nearest of `known`, or else all `listed`.

    In `source` a key is written as `prefix` + `spell(key)`. `listed` is by default `known`.
    """
    if not isinstance(key, str):
        return SettingsError(f"{source}: a key is a {type(key).__name__}; keys are texts")
    shown = prefix + key if key.isprintable() and len(key) <= 80 else f"of {len(key)} characters"
    if looks_like_credential(key):
        return SettingsError(
            f"{source}: {shown} is a credential under a name that nobody reads; a store in a "
            "bucket takes credentials_file or profile, one in a directory none"
        )
    names = sorted(known)
    guess = nearest(key, names)
    if guess:
        advice = f"did you mean {prefix}{spell(guess)}?"
    else:
        advice = f"known are {', '.join(map(spell, names if listed is None else listed))}"
    return SettingsError(f"{source}: unknown key {shown}; {advice}")


def read_extra_config(text: str) -> dict[str, object]:
    """The mapping in a value of SGLang's `--hicache-storage-backend-extra-config`.

    JSON, or "@" and the name of a settings file. Raises `SettingsError`, which quotes nothing.
    """
    if text.startswith("@"):
        return read_settings_file(text)
    try:
        content = _load_json(text)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"the extra config, line {error.lineno}, column {error.colno}: {error.msg}; write "
            "JSON, or @ and the name of a file"
        ) from None
    except ValueError as error:
        raise SettingsError(f"the extra config: {error}") from None
    except RecursionError:
        raise SettingsError("the extra config is nested too deeply") from None
    if not isinstance(content, dict):
        raise SettingsError(
            f"the extra config holds a {type(content).__name__}; write key and value pairs"
        )
    return content


def read_settings_file(path: str | Path) -> dict[str, object]:
    """The mapping in a .toml, .json, .yaml or .yml file; a key written twice is an error.

    An "@" before the name, as SGLang writes it, is left out.
    """
    file = Path(str(path).removeprefix("@"))
    readers: dict[str, Callable[[str], object]] = {
        ".toml": tomllib.loads,
        ".json": _load_json,
        ".yaml": _load_yaml,
        ".yml": _load_yaml,
    }
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise SettingsError(f"settings file {file}: its name must end in .toml, .json or .yaml")
    try:
        content = reader(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"settings file {file} does not exist; check the path") from None
    except OSError as error:
        raise SettingsError(f"settings file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"settings file {file} is not UTF-8 text") from None
    except RecursionError:
        raise SettingsError(f"settings file {file} is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"settings file {file}, line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError(f"settings file {file}{place}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # tomllib's message is one line with its place
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(f"settings file {file}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"settings file {file} holds a {type(content).__name__}; write key and value pairs"
        )
    return content


def _load_json(text: str) -> object:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"key {key!r} is written twice")
            result[key] = value
        return result

    return json.loads(text, object_pairs_hook=once)


class _YamlLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; this one refuses the second."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            # "<<" merges are resolved by the parent and may repeat.
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> object:
    return yaml.load(text, Loader=_YamlLoader)
