"""What other processes do in tests of buckets: `python -m object_children FUNCTION ARGUMENTS`."""

import json
import random
import sys
import time
from typing import Any

import slabs
from objectstores import open_objects_tenant
from s3_server import S3Address, bucket


def use(
    server: dict[str, Any], name: str, prefix: str, seed: int, seconds: float, model: str
) -> None:
    """Put and get, own and shared chains; prints how many pages were stored and right."""
    chooser = random.Random(seed)
    right = stored = 0
    end = time.monotonic() + seconds
    there = bucket(S3Address(**server), name, prefix)
    with open_objects_tenant(there, payload=32 * slabs.KIB, model=model) as tenant:
        while time.monotonic() < end:
            chain: Any = ("shared", chooser.randrange(6))
            if chooser.random() < 0.5:
                chain = ("own", seed, chooser.randrange(6))
            keys = slabs.chain_keys(chain, 32)
            if chooser.random() < 0.4:
                stored += sum(tenant.put(keys))
            else:
                tenant.exists(keys)
                right += sum(tenant.get(keys))
    sys.stdout.write(json.dumps({"right": right, "stored": stored}) + "\n")


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
