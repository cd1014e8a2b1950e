"""A process whose bucket has a name that stops resolving; runs in a mount namespace of its own.

name_child.py fails|hangs JSON     JSON: port, bucket and prefix; a directory
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_proxy import FaultProxy, refuse
from object_connectors import connected
from s3_access import store_url
from storage_load import Load

DEADLINE_S = 1.0
NAME = "bucket.test"
NAME_SERVER = "127.53.53.53"
UNSEEN = 5000
"""A group of pages that no load sets."""


def is_unresolved(load: Load) -> bool:
    assert load.exists(UNSEEN) == 0
    reason = load.connector._tier.guard.state().read.reason
    return re.search("cannot be resolved|in time", reason) is not None


def main(how: str, port: int, bucket: str, prefix: str, directory: str) -> None:
    hosts, resolver = Path(directory, "hosts"), Path(directory, "resolv.conf")
    known = f"127.0.0.1 localhost\n127.0.0.1 {NAME}\n"
    hosts.write_text(known)
    resolver.write_text(f"nameserver {NAME_SERVER}\n")
    for file, place in ((hosts, "/etc/hosts"), (resolver, "/etc/resolv.conf")):
        subprocess.run(["mount", "--bind", str(file), place], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent, FaultProxy(port) as proxy:
        if how == "hangs":
            silent.bind((NAME_SERVER, 53))
        url = store_url(f"http://{NAME}:{proxy.port}", bucket, prefix)
        with connected(url, deadline_s=DEADLINE_S) as load:
            while not load.counts["read"]:
                load.run(1.0)
            with load.running():
                hosts.write_text("127.0.0.1 localhost\n")
                proxy.set(refuse())  # connections that are open need no name
                proxy.set()
                time.sleep(DEADLINE_S + 2.5)
                # NIXL's client may remember the address, and what was seen lately is not asked for
                # again, so that pages still move; whether others are there cannot be answered.
                load.wait_until("a reason", lambda: is_unresolved(load), 30)
                hosts.write_text(known)
                load.wait_works(30)
            load.check()


if __name__ == "__main__":
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    main(sys.argv[1], **json.loads(sys.argv[2]))
