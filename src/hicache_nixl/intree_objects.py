"""Where an object store is, from what AWS, Azure, NIXL and the in-tree connector have names for.

This module owns the variables of the AWS and Azure tools, and which parameters of the in-tree
sections `plugin.obj` and `plugin.azure_blob` say where the store is. It must not know which source
wins over a setting of our own, nor read the environment itself.

A variable never makes a store: it completes one that is an object store anyway.
"""

import functools
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from hicache_nixl.errors import SettingsError
from hicache_nixl.intree import explained
from hicache_nixl.intree_store import SUBDIRECTORY
from hicache_nixl.object_url import PARAMETERS, is_address
from hicache_nixl.sources import ENVIRONMENT, Given
from hicache_nixl.store_url import StoreUrl, object_store

SCHEME_OF = {"obj": "s3", "azure_blob": "azure"}
"""The scheme of the stores that a plug-in serves."""

# NIXL documents AWS_DEFAULT_BUCKET and
# AWS_ENDPOINT_OVERRIDE; 1.5.1 does not read the latter. The rest is read by the AWS and Azure SDKs.
_CONFIGURED_URLS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
VARIABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "s3": {
        "bucket": ("AWS_DEFAULT_BUCKET",),
        "endpoint": ("AWS_ENDPOINT_OVERRIDE", *_CONFIGURED_URLS),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
        "ca_bundle": ("AWS_CA_BUNDLE",),
    },
    "azure": {
        "bucket": ("AZURE_STORAGE_CONTAINER_NAME",),
        "account_url": ("AZURE_STORAGE_ACCOUNT_URL",),
        "ca_bundle": ("AZURE_CA_BUNDLE",),
        "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
    },
}
"""By scheme and name of the value: in each row the first that is set counts."""
# What says where the store is: the parameter of a store URL, and NIXL's.
_PLACES: dict[str, dict[str, str]] = {
    "s3": {
        "bucket": "bucket",
        "endpoint": "endpoint_override",
        "region": "region",
        "addressing": "use_virtual_addressing",
        "ca_bundle": "ca_bundle",
    },
    "azure": {"bucket": "container_name", "account_url": "account_url", "ca_bundle": "ca_bundle"},
}
_SCHEME = "scheme"
PLACE_NAMES = {
    plugin: {*_PLACES[scheme].values(), *((_SCHEME,) if scheme == "s3" else ())}
    for plugin, scheme in SCHEME_OF.items()
}
"""NIXL parameters that become part of the store URL, by plug-in."""

Parameters = Mapping[tuple[str, str], tuple[Given, str]]
Place = dict[str, tuple[Given, str]]
"""Bucket and URL parameters by name: where each was given, and its text."""


def variables(environ: Mapping[str, str]) -> dict[str, dict[str, Given]]:
    """What the environment says of object stores, by scheme and name; empty ones left out."""
    ignored = environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").strip().lower() == "true"
    skipped = _CONFIGURED_URLS if ignored else ()
    found: dict[str, dict[str, Given]] = {}
    for scheme, rows in VARIABLES.items():
        for name, candidates in rows.items():
            given = [
                Given(name, environ[variable].strip(), variable, ENVIRONMENT)
                for variable in candidates
                if variable not in skipped and environ.get(variable, "").strip()
            ]
            if given:
                found.setdefault(scheme, {})[name] = given[0]
    return found


def place_of(plugin: str, parameters: Parameters) -> tuple[Place, list[str]]:
    """What the section of `plugin` says of the place, in the words of a store URL; and notes."""
    own = {name: value for (owner, name), value in parameters.items() if owner == plugin}
    place = {
        name: own[theirs] for name, theirs in _PLACES[SCHEME_OF[plugin]].items() if theirs in own
    }
    if "addressing" in place:
        given, text = place["addressing"]
        place["addressing"] = (given, "virtual" if text == "true" else "path")
    notes = []
    if _SCHEME in own:
        given, scheme = own[_SCHEME]
        if "endpoint" in place and "://" not in place["endpoint"][1]:
            notes.append(f"{given.origin} is read as part of endpoint")
        else:
            why = "the endpoint's URL says it" if "endpoint" in place else "there is no endpoint"
            notes.append(f"{given.origin} is not used: {why}")
    if "endpoint" in place and "://" not in place["endpoint"][1]:
        given, text = place["endpoint"]
        scheme = own[_SCHEME][1] if _SCHEME in own else "https"  # NIXL's default
        place["endpoint"] = (given, f"{scheme}://{text}")
    return place, notes


def store_from(plugin: str, place: Place, defaults: Mapping[str, Given]) -> tuple[StoreUrl, str]:
    """The store that an in-tree section or the environment names, without parameters; a note."""
    scheme = SCHEME_OF[plugin]
    if "bucket" in place:
        given, bucket = place["bucket"]
    elif "bucket" in defaults:
        given = defaults["bucket"]
        bucket = given.value
    else:
        key = f"plugin.{plugin}.{_PLACES[scheme]['bucket']}"
        raise SettingsError(
            f"plugin {plugin} has no bucket; set store, for example {scheme}://bucket/prefix, or "
            f"{key} or {VARIABLES[scheme]['bucket'][0]}"
        )
    url = explained(given, lambda: object_store(scheme, bucket, SUBDIRECTORY))
    return url, (
        f"{given.origin} is read as store = {url}; in-tree objects are not read; set store to "
        "choose otherwise"
    )


def completed(
    url: StoreUrl, place: Place, defaults: Mapping[str, Given]
) -> tuple[StoreUrl, list[str]]:
    """`url` with the parameters it lacks, from in-tree sections and variables; and notes."""
    notes: list[str] = []
    if "bucket" in place and place["bucket"][1] != url.bucket:
        notes.append(f"{place['bucket'][0].origin} is not used: store names {url.bucket}")
    for name, check in PARAMETERS[url.scheme].items():
        if name not in place and (url.parameter(name) is not None or name not in defaults):
            continue
        if name == "ca_bundle" and (url.parameter("endpoint") or "").startswith("http://"):
            if name in place:
                notes.append(f"{place[name][0].origin} is not used: the endpoint is http")
            continue
        given, text = place[name] if name in place else (defaults[name], defaults[name].value)
        if name == "ca_bundle":
            text = os.path.abspath(text)
        value = explained(given, functools.partial(check, text))
        own = url.parameter(name)
        if own is None:
            url = url.with_parameter(name, value)
            notes.append(f"{given.origin} is read as {name} = {value} of the store")
        elif own != value:
            notes.append(f"{given.origin} is not used: store says {name} = {own}")
    endpoint = url.parameter("endpoint")
    host = urlsplit(endpoint).hostname if endpoint else None
    if host and is_address(host) and url.parameter("addressing") == "virtual":
        notes.append(f"addressing = virtual is read as path: {host} is an address, not a name")
        others = tuple(pair for pair in url.params if pair[0] != "addressing")
        url = StoreUrl(url.scheme, url.path, (*others, ("addressing", "path")))
    return url, notes
