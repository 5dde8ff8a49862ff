"""No network but this machine's: this process's sockets reach no other host. Of processes that tests start, it knows nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

HERE = ("127.0.0.1", "::1", "localhost", "", None)


def only() -> None:
    """Close the sockets, for good."""
    for call in ("connect", "connect_ex", "sendto", "sendmsg"):
        _close(socket.socket, call, _peer)
    for call in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        _close(socket, call, _asked)


def _close(owner: Any, call: str, host_of: Callable[..., Any]) -> None:
    real = getattr(owner, call)

    def guarded(*arguments: Any, **more: Any) -> Any:
        if (host := host_of(*arguments, **more)) not in HERE:
            raise AssertionError(f"a test reached for {host}")
        return real(*arguments, **more)

    setattr(owner, call, guarded)


def _peer(self: socket.socket, *arguments: Any) -> Any:
    """Find the host in connect(address), sendto(data, [flags,] address) and sendmsg(buffers, ancillary, flags, address)."""
    inet = self.family in (socket.AF_INET, socket.AF_INET6)
    return arguments[-1][0] if inet and arguments and isinstance(arguments[-1], tuple) else None


def _asked(host: Any, *arguments: Any, **more: Any) -> Any:
    return host.decode() if isinstance(host, bytes) else host
