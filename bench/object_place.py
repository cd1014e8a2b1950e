"""Where the objects of a run lie and how many requests are in flight: the same for every client."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bench.s3_server import ACCESS_KEY, REGION, SECRET_KEY

CONCURRENCY = 32
"""What ours chooses by itself."""


@dataclass(frozen=True)
class ObjectPlace:
    """A bucket of a server in plain HTTP, path addressing."""

    endpoint: str
    bucket: str
    concurrency: int | None = CONCURRENCY
    """Requests in flight; None leaves it to the client."""
    region: str = REGION
    access_key: str = ACCESS_KEY
    secret_key: str = field(default=SECRET_KEY, repr=False)

    def nixl_parameters(self) -> dict[str, str]:
        """Parameters of NIXL's OBJ plug-in."""
        threads = {} if self.concurrency is None else {"num_threads": str(self.concurrency)}
        return {
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "bucket": self.bucket,
            "endpoint_override": self.endpoint,
            "scheme": urlsplit(self.endpoint).scheme,
            "region": self.region,
            **threads,
        }
