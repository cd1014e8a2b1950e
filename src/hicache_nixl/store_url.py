"""Store URLs: where a store is, as text and as a value.

This module owns the URL grammar; `object_url` owns what object stores take in it. It must not know
what a store does with its URL, nor look at the disk beyond resolving links to find one directory
given twice.

    slab:///nvme0/hicache                         local disk
    files:///mnt/3fs/hicache                      shared file system
    s3://bucket/prefix?endpoint=http://host:9000  object store
    azure://container/prefix?account_url=…        object store

Characters with a meaning in a URL are percent-encoded in paths: `%25 %23 %2C %3F`.
"""

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from hicache_nixl.errors import SettingsError
from hicache_nixl.object_url import check_bucket, check_parameter, check_prefix
from hicache_nixl.sources import looks_like_credential, nearest

_DIRECTORY_SCHEMES = ("slab", "files")
OBJECT_SCHEMES = ("s3", "azure")
SCHEMES = (*_DIRECTORY_SCHEMES, *OBJECT_SCHEMES)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_HINT = 'write for example "slab:///nvme0/hicache"'


@dataclass(frozen=True)
class StoreUrl:
    """One store location.

    `path` is an absolute directory for slab and files, "bucket" or "bucket/prefix" otherwise.
    `params` are the query's pairs in order, names unique and canonical, none of them a credential.
    """

    scheme: str
    path: str
    params: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        # By bytes, so that a directory name that is not UTF-8 survives; "," separates stores.
        query = "&".join(f"{quote(k, safe='')}={quote(v, safe=':/')}" for k, v in self.params)
        return f"{self.scheme}://{quote(os.fsencode(self.path))}" + (f"?{query}" if query else "")

    @property
    def is_directory(self) -> bool:
        """Whether the store lies in a directory, not in a bucket."""
        return self.scheme in _DIRECTORY_SCHEMES

    @property
    def bucket(self) -> str:
        """The bucket of an object store."""
        return self.path.partition("/")[0]

    @property
    def prefix(self) -> str:
        """The prefix in the bucket, or ""."""
        return self.path.partition("/")[2]

    def parameter(self, name: str) -> str | None:
        """The value of a parameter, by its canonical name."""
        return dict(self.params).get(name)

    def with_parameter(self, name: str, value: str) -> "StoreUrl":
        """This location, with one parameter more."""
        return StoreUrl(self.scheme, self.path, (*self.params, (name, value)))


def parse_store_urls(value: object) -> tuple[StoreUrl, ...]:
    """The stores in `value`: a URL, a comma-separated text of URLs, or a list of either.

    Raises `SettingsError` for a malformed URL, a store given twice, or several stores of which
    one is not slab.
    """
    urls = tuple(_each(value))
    seen: dict[str, StoreUrl] = {}
    for url in urls:
        place = os.path.realpath(url.path) if url.is_directory else f"{url.scheme}://{url.path}"
        other = seen.setdefault(place, url)
        if other is not url:
            raise SettingsError(
                f"{url.scheme} stores {other.path!r} and {url.path!r} are the same; name each once"
            )
    if len(urls) > 1 and any(url.scheme != "slab" for url in urls):
        raise SettingsError("only slab stores can be striped; name one store, or several slab:///")
    return urls


def object_store(
    scheme: str, bucket: str, prefix: str, params: tuple[tuple[str, str], ...] = ()
) -> StoreUrl:
    """The store in a bucket, canonical. Raises `SettingsError` for a name or parameter."""
    place = f"{check_bucket(scheme, bucket)}/{check_prefix(prefix)}".rstrip("/")
    checked: dict[str, str] = {}
    for name, value in params:
        own, canonical = check_parameter(scheme, name, value)
        if own in checked:
            raise SettingsError(f"the parameters {own!r} and {name!r} are the same; keep one")
        checked[own] = canonical
    return StoreUrl(scheme, place, tuple(checked.items()))


def slab_directory(path: str) -> StoreUrl:
    """The slab store in directory `path`, which must be absolute and below `/`."""
    if "\0" in path or "\n" in path:
        raise SettingsError(f"{path!r} is not a directory name; {_HINT}")
    if not path.startswith("/"):
        raise SettingsError(f"{path!r} is not an absolute directory; {_HINT}")
    normal = "/" + os.path.normpath(path).lstrip("/")
    if normal == "/":
        raise SettingsError(f"{path!r} names no directory of its own; {_HINT}")
    return StoreUrl("slab", normal)


def _each(value: object) -> list[StoreUrl]:
    if isinstance(value, StoreUrl):
        return [value]
    if isinstance(value, str):
        return [_parse(text.strip()) for text in value.split(",")] if value.strip() else []
    if isinstance(value, list | tuple):
        return [url for item in value for url in _each(item)]
    raise SettingsError(f"a {type(value).__name__} is not a store URL; {_HINT}")


def _shown(text: str) -> str:
    """`text` for a message, without what may be a secret."""
    if "@" in text or looks_like_credential(text.partition("?")[0]):
        return "the given text"
    text = re.sub(r"([?&;][^=&;]*)=[^&;]*", r"\1=...", text)
    return repr(text) if len(text) <= 200 else f"a text of {len(text)} characters"


def _parse(text: str) -> StoreUrl:
    if not text:
        raise SettingsError(f"an empty entry is not a store URL; {_HINT}")
    match = _SCHEME.match(text)
    if match is None:
        hint = f'write "slab://{text}"' if re.fullmatch(r"/[\w./-]*", text) else _HINT
        raise SettingsError(f"{_shown(text)} is not a store URL; {hint}")
    scheme = match[1].lower()
    if scheme not in SCHEMES:
        guess = nearest(scheme, SCHEMES)
        raise SettingsError(
            f"{_shown(text)} has the unknown scheme {scheme!r}; "
            + (f"did you mean {guess}://?" if guess else f"known are {', '.join(SCHEMES)}")
        )
    if not text.isprintable():  # urlsplit would drop tabs and line breaks in silence
        raise SettingsError(f"{_shown(text)} holds a control character; {_HINT}")
    try:
        parts = urlsplit(text)
        path = unquote(parts.path, errors="surrogateescape")
    except ValueError:  # its message may quote what stands before an "@"
        raise SettingsError(f"{_shown(text)} is not a store URL; {_HINT}") from None
    if "@" in parts.netloc:
        raise SettingsError(f"{_shown(text)} holds a user name; a store URL carries no credential")
    if parts.fragment or text.endswith("#"):
        raise SettingsError(f'{_shown(text)} holds a "#"; write it as %23')
    params = _params(text, parts.query)
    if scheme in _DIRECTORY_SCHEMES:
        if parts.netloc:
            raise SettingsError(
                f"{_shown(text)} names a host; a directory takes three slashes, "
                f"as in {_shown(f'{scheme}:///{parts.netloc}{parts.path}')}"
            )
        if params:
            raise SettingsError(
                f"{_shown(text)} has the parameter {params[0][0]!r}; a {scheme} URL takes none, "
                'write "?" in a directory name as %3F'
            )
        return StoreUrl(scheme, slab_directory(path).path)
    if not parts.netloc:
        raise SettingsError(f"{_shown(text)} names no bucket; write for example s3://bucket/prefix")
    return object_store(scheme, parts.netloc, path, params)


def _params(text: str, query: str) -> tuple[tuple[str, str], ...]:
    params = tuple(parse_qsl(query, keep_blank_values=True))
    names = [name for name, _ in params]
    for name, value in params:
        if looks_like_credential(name) or "@" in value:
            raise SettingsError(
                f"{_shown(text)} has the parameter {name!r}; a store URL carries no credential, "
                "set credentials_file or profile beside store"
            )
        if names.count(name) > 1:
            raise SettingsError(f"{_shown(text)} has the parameter {name!r} twice; keep one")
    return params
