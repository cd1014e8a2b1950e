"""What was found of an object store at start, as lines for people and programs.

Says where credentials come from, never what they are.
"""

from hicache_nixl.bucket import Bucket
from hicache_nixl.errors import StoreError
from hicache_nixl.finding import Finding
from hicache_nixl.startup import BucketFindings

_TRIES_ONCE = "AWS_MAX_ATTEMPTS=1"


def in_bucket(start: BucketFindings) -> list[Finding]:
    """Where the bucket is, whether it works, and what bounds it. Asks for its lifecycle rule, which
    may take 10 s."""
    bucket = start.bucket
    where = bucket.endpoint or "AWS"
    if bucket.kind == "s3":
        addressing = "virtual-hosted" if bucket.virtual_addressing else "path"
        where += f", region {bucket.region}, {addressing} addressing"
    slow = _TRIES_ONCE not in start.retries
    return [
        Finding("store", f"objects in {bucket.url} at {where}"),
        Finding("credentials", str(bucket.credentials)),
        Finding("bucket", start.verdict),
        Finding("I/O", f"NIXL {start.plugin}, {start.requests}"),
        Finding(
            "retries",
            start.retries,
            "a request that fails is tried again before anything is known of it; unset both"
            if slow and bucket.kind == "s3"
            else None,
        ),
        _expiry(bucket),
    ]


def _expiry(bucket: Bucket) -> Finding:
    from hicache_nixl.credentials import CredentialResolver
    from hicache_nixl.stores.objects_admin import show_lifecycle

    topic = "capacity"
    if bucket.kind != "s3":
        return Finding(
            topic, "whatever the account's lifecycle management leaves", "give the container a rule"
        )
    try:
        days = show_lifecycle(bucket, CredentialResolver.of(bucket))
    except StoreError as error:
        return Finding(topic, f"not known: {error}")
    if days is None:
        return Finding(
            topic,
            "no bound: the bucket has no lifecycle rule for this store",
            f"hicache-nixl lifecycle --store {bucket.url} --expire-days 7",
        )
    return Finding(topic, describe_expiry(days))


def describe_expiry(days: int) -> str:
    """The lifecycle rule of a store, in words."""
    return f"pages expire {days} day{'' if days == 1 else 's'} after they were written"
