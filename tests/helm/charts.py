"""The chart as the tests see it: what helm says of it, and the manifests that it renders.

Owns the calls of helm. Knows nothing of what must be in a manifest.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).parents[2]
CHART = PROJECT / "helm" / "hicache-nixl"
TOOLS = PROJECT / ".helm"
RELEASE = "trial"
HANG = 60.0
"""Seconds after which a call of helm hangs; it takes 0.1."""
SCENARIOS = tuple(
    sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
)

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """What a call of helm gave."""

    status: int
    output: str
    errors: str


def helm(*arguments: str) -> Ran:
    """Call helm; blocks until it ends."""
    ran = subprocess.run(
        [str(TOOLS / "helm"), *arguments], capture_output=True, text=True, timeout=HANG
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def scenario_file(scenario: str) -> str:
    """The values file of a scenario."""
    return str(CHART / "ci" / f"{scenario}-values.yaml")


def options(scenario: str | None, values: Mapping[str, Any] | None) -> list[str]:
    """helm's options for a scenario, and values over it: dotted names, or trees."""
    given = [] if scenario is None else ["--values", scenario_file(scenario)]
    for name, value in (values or {}).items():
        given += ["--set-json", f"{name}={json.dumps(value)}"]
    return given


def template(scenario: str | None = None, values: Mapping[str, Any] | None = None) -> Ran:
    """What ``helm template`` gives."""
    return helm("template", RELEASE, str(CHART), *options(scenario, values))


def notes(scenario: str | None, values: Mapping[str, Any] | None = None) -> str:
    """What helm install says."""
    given = options(scenario, values)
    ran = helm("install", RELEASE, str(CHART), "--dry-run=client", *given)
    assert ran.status == 0, ran.errors
    return ran.output.partition("\nNOTES:\n")[2]


@dataclass(frozen=True)
class Manifests:
    """What a chart rendered."""

    every: tuple[Manifest, ...]

    def of(self, kind: str, suffix: str | None = None) -> list[Manifest]:
        """Those of a kind, whose names are the release's with `suffix` if that is given."""
        name = None if suffix is None else f"{RELEASE}-hicache-nixl{suffix}"
        return [
            found
            for found in self.every
            if found["kind"] == kind and name in (None, found["metadata"]["name"])
        ]

    def one(self, kind: str, suffix: str = "") -> Manifest:
        """The only one of a kind and name."""
        (found,) = self.of(kind, suffix)
        return found

    @property
    def workload(self) -> Manifest:
        """The server's Deployment or StatefulSet."""
        (found,) = [*self.of("Deployment", ""), *self.of("StatefulSet", "")]
        return found

    @property
    def server(self) -> Manifest:
        """The specification of the server's pod."""
        spec: Manifest = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        """The container of SGLang."""
        return named(self.server["containers"], "server")

    @property
    def pods(self) -> Iterator[tuple[str, Manifest]]:
        """Kind and name, and the specification, of each pod."""
        for found in self.every:
            name = f"{found['kind']} {found['metadata']['name']}"
            if found["kind"] == "Pod":
                yield name, found["spec"]
            elif found["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
                yield name, found["spec"]["template"]["spec"]

    @property
    def settings(self) -> dict[str, Any]:
        """The library's settings file."""
        content: dict[str, Any] = yaml.safe_load(self.settings_text)
        return content

    @property
    def settings_text(self) -> str:
        """The same as text."""
        text: str = self.one("ConfigMap")["data"]["settings.yaml"]
        return text

    @property
    def flags(self) -> dict[str, str]:
        """SGLang's flags with their values; "" for one that has none."""
        found: dict[str, str] = {}
        words = self.container["args"]
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--"):
                found[word] = "" if following.startswith("--") else following
        return found


def containers(spec: Manifest) -> list[Manifest]:
    """All containers of a pod, those that only begin it first."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def named(things: list[Manifest], name: str) -> Manifest:
    """The one of that name."""
    (found,) = [thing for thing in things if thing["name"] == name]
    return found


def environment(container: Manifest) -> dict[str, Any]:
    """Its variables: the value, or where it comes from."""
    return {
        entry["name"]: entry["value"] if "value" in entry else entry["valueFrom"]
        for entry in container.get("env", ())
    }


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that stands twice in one mapping is an error, as for Kubernetes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """ValueError if there is one."""
        keys = [key.value for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise ValueError(f"{keys} has a key twice{node.start_mark}")
        return super().construct_mapping(node, deep)


def render(scenario: str | None = None, values: Mapping[str, Any] | None = None) -> Manifests:
    """The manifests of a scenario with values over it; AssertionError if there are none."""
    return _render(scenario, json.dumps(values or {}))


@cache
def _render(scenario: str | None, values: str) -> Manifests:
    return manifests(template(scenario, json.loads(values)))


def manifests(ran: Ran) -> Manifests:
    """Those that ``helm template`` gave; AssertionError if it gave none."""
    assert ran.status == 0, ran.errors
    every = yaml.load_all(ran.output, Loader=UniqueKeys)
    return Manifests(tuple(found for found in every if found))
