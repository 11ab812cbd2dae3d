"""What the master of a pool says of itself over HTTP."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException

TIMEOUT = 0.5
"""Seconds for a connection, and for each piece of an answer."""
LARGEST = 1 << 24
"""Bytes of an answer that are read."""


def fetch(host: str, port: int, path: str) -> str:
    """The text there. Raises OSError if nobody answers, or with something else than HTTP."""
    connection = HTTPConnection(host, port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(LARGEST).decode("utf-8", "replace")
    except HTTPException as error:
        raise OSError(f"no HTTP answer from {host}:{port}") from error
    finally:
        connection.close()


def metric(text: str, name: str) -> float:
    """The value of a metric without labels. Raises KeyError if there is none."""
    for line in text.splitlines():
        found, _, value = line.partition(" ")
        if found == name:
            return float(value)
    raise KeyError(name)


class Meter:
    """Use and capacity of a pool. Thread-safe."""

    def __init__(self, address: str) -> None:
        """`host:port` of the master's metrics."""
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)

    def read(self) -> tuple[int, int] | None:
        """(bytes in use, bytes in all); None if the master does not say."""
        try:
            text = fetch(self._host, self._port, "/metrics")
            used, capacity = "master_allocated_bytes", "master_total_capacity_bytes"
            return int(metric(text, used)), int(metric(text, capacity))
        except (OSError, KeyError, ValueError):
            return None
