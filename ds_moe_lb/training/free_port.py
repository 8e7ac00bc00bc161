"""A port for ranks on this machine to meet at."""

import random
import socket

# Below the ports that Linux hands out by itself (from 32768 on): a rank may listen half a minute
# after its port was chosen, and any other connection could have got it meanwhile.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port that was free a moment ago.

    Raises:
        RuntimeError: there was none.
    """
    # Not the seeded generator: two runs that start alike would meet.
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(
        f"no free TCP port among 100 from {_PORTS.start} to {_PORTS.stop - 1} on this machine"
    )
