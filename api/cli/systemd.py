"""What systemd is told of a service of `Type=notify`: that it is ready, that it ends, that it is alive.

Source: sd_notify(3) and sd_watchdog_enabled(3): a datagram of KEY=VALUE lines to the socket that NOTIFY_SOCKET names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send `state`, such as "READY=1"; nothing where no NOTIFY_SOCKET is set. A socket that fails is a warning."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)  # a listener that does not read must not hold up the server
            sender.sendto(state.encode(), address)
    except OSError as error:
        log.warning("NOTIFY_SOCKET %r: %s was not sent: %s", address, state, error)


def watchdog_s() -> float | None:
    """Seconds within which systemd wants a sign of life of this process (WatchdogSec=); None if it wants none."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdecimal() or int(microseconds) == 0 or pid != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


async def keep_alive() -> None:
    """Signs of life, two in each interval, as long as the event loop runs. The engine has a watch of its own."""
    seconds = watchdog_s()
    while seconds is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / 2)
