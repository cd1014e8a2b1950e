"""TCP ports of 127.0.0.1 for servers of tests."""

import socket


def hold_port() -> socket.socket:
    """A socket on a port that nobody else is given until it is closed.

    It does not listen, so that a server which sets SO_REUSEADDR can, as often as it likes; servers
    of asyncio and of Go do. While none does, connections are refused.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
