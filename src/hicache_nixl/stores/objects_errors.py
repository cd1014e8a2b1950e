"""What a failed request to a bucket means, in one line: the bucket, what was said, the fix.

Nothing of a response is quoted but its status and error code: bodies and URLs may hold secrets.
"""

import re
from typing import Final

from hicache_nixl.bucket import Bucket
from hicache_nixl.errors import StoreError

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_SIGNS: Final = (
    ("dns error", "its name cannot be resolved; correct the endpoint or the name service"),
    ("ConnectionRefused", "the connection is refused; see whether the server runs"),
    ("InvalidContentType", "it does not speak TLS; use http:// in the endpoint"),
    ("UnknownIssuer", "its certificate is signed by nobody known; name its CA as ca_bundle"),
    ("NotValidForName", "its certificate is for another name; correct the endpoint"),
    ("ertificate", "its certificate is refused; correct it or name its CA as ca_bundle"),
    ("BareRedirect", "it redirects elsewhere; correct the region"),
    ("TimedOut", "it does not answer in time; see whether the server is well"),
    ("kind: Timeout", "it does not answer in time; see whether the server is well"),
    ("IncompleteMessage", "it closed the connection; see whether the server is well"),
    ("ConnectionReset", "it closed the connection; see whether the server is well"),
    ("IncompleteBody", "it closed the connection; see whether the server is well"),
    ("kind: Connect", "it cannot be reached; correct the endpoint or the network"),
)


class RefusedError(StoreError):
    """The server does not accept the credentials, or not for this."""


def error_of(error: Exception, bucket: Bucket, what: str) -> StoreError:
    """What `error`, of obstore, means for doing `what`, such as "read"."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    named = _CODE.search(text)
    code = named[1] if named else ""
    if code in _NO_BUCKET:
        return no_bucket(bucket)
    said = " ".join(filter(None, (str(status or ""), code)))
    # AWS answers 400 to a token that has run out; to a HEAD, without the code that says so.
    if status in (401, 403) or (status == 400 and ("Token" in code or not code)):
        return RefusedError(
            f"{bucket} refuses to {what} ({said}) with {bucket.credentials}; correct the "
            "credentials or what they may do"
        )
    if status is not None:
        return StoreError(f"{bucket} cannot {what} ({said}); see the server's log")
    for sign, meaning in _SIGNS:
        if sign in text:
            return StoreError(f"{bucket} cannot {what}: {meaning}")
    return StoreError(f"{bucket} cannot {what}: {type(error).__name__}; see the server's log")


def says_no_bucket(error: Exception) -> bool:
    """Whether it is the bucket that was not found, not the object. Only the answer to a GET, PUT or
    listing says so."""
    return any(f"<Code>{code}</Code>" in str(error) for code in _NO_BUCKET)


def no_bucket(bucket: Bucket) -> StoreError:
    """The error for a bucket that is not there."""
    if bucket.kind == "azure":
        return StoreError(
            f"{bucket}: there is no container {bucket.name!r}; correct the name or create it"
        )
    return StoreError(
        f"{bucket}: there is no bucket {bucket.name!r}; correct the name, create it, or set "
        "create_bucket"
    )


def no_answer(bucket: Bucket, what: str) -> StoreError:
    """The error for a request that did not end by its deadline."""
    return StoreError(
        f"{bucket} cannot {what}: it does not answer in time; see whether the server is well"
    )
