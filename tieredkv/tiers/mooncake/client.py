"""One client of a Mooncake pool: no call on it crashes, and none after a failure waits.

The library behind it answers with numbers, dereferences what it is given, and dies when it is
used before setup or closed under a call. So calls are counted, `close` waits for them, and a
circuit breaker keeps everybody away while the master does not answer; one thread looks whether
it is back.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tieredkv.errors import ConfigError
from tieredkv.tiers.mooncake.breaker import CircuitBreaker

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
"""Calls that run at a time. Over TCP a call keeps a core here and one at the owner busy; the
library allows some 32 per client."""
TURN = 1.0
"""Seconds that a call waits for its turn."""
CONNECT = 0.2
"""Seconds for a connection to the master's port, before the library is let near it."""
OPENING = 5.0
"""Seconds that a new client waits for its first connection."""
CLOSING = 10.0
"""Seconds that `close` waits for calls under way."""
PATIENCE = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
}
"""The library's own deadlines, unless the environment sets others; by default up to a minute."""
DOWN = frozenset({-900, -901})
"""Codes of a master that is dead or frozen."""
PROBE = "tieredkv/probe"


class PoolClient:
    """Thread-safe. In a forked child, where the library would hang, no call is tried."""

    def __init__(
        self, master: str, segment: int, protocol: str, devices: str, host: str | None
    ) -> None:
        """`master` is its `host:port`. `segment` bytes of this process's memory join the pool
        (0: none, else at least 16 MiB); `host` is the address under which others reach them, None:
        the one from which this machine reaches the master.

        Waits some seconds for the pool at most: without it, it opens later. Raises ConfigError
        if the library is missing.
        """
        self._library = load_library()
        self._pid = os.getpid()
        self._master, self._segment = master, segment
        self._protocol, self._devices, self._host = protocol, devices, host
        self.breaker = CircuitBreaker(time.monotonic)
        self._store: Any = None
        self._turns = threading.BoundedSemaphore(CALLS)
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._regions: list[tuple[int, int]] = []
        self._registered: list[tuple[int, int]] = []
        self._opened = threading.Event()
        self._prober = threading.Thread(
            target=self._probe, name="tieredkv-mooncake-probe", daemon=True
        )
        self._prober.start()
        if not self._opened.wait(OPENING):
            log.warning("mooncake master %s does not answer: going on without the pool", master)

    def register(self, address: int, nbytes: int) -> None:
        """Buffers in this memory may be given to calls without a copy. It must stay until
        `close`."""
        with self._changed:
            self._regions.append((address, nbytes))
            store = self._store
        if store is not None:
            self._register(store, address, nbytes)

    def reaches(self, address: int, nbytes: int) -> bool:
        """Is this memory registered?"""
        end = address + nbytes
        return any(lo <= address and end <= lo + size for lo, size in self._registered)

    def call(self, work: Callable[[Any], T], *, data: bool = True) -> T | None:
        """`work(library's store)`, in this thread; None where it is not even tried: closed, down,
        a forked child, or no turn. What moves no `data` needs no turn. The caller tells
        `answered` what came back."""
        if os.getpid() != self._pid or not self.breaker.closed:
            return None
        if data and not self._turns.acquire(timeout=TURN):
            return None
        try:
            with self._changed:
                if self._closed or not self.breaker.closed:
                    return None
                self._running += 1
            try:
                return work(self._store)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
        finally:
            if data:
                self._turns.release()

    def answered(self, codes: Sequence[int]) -> None:
        """Open the circuit if these say that the master is gone."""
        if not DOWN.isdisjoint(codes):
            self.broke(f"error {min(codes)}")

    def broke(self, reason: str) -> None:
        """Keep everybody away until a probe has succeeded."""
        if self.breaker.closed:
            log.warning("mooncake master %s: %s; going on without the pool", self._master, reason)
        self.breaker.failed()
        with self._changed:
            self._changed.notify_all()

    def exist(self, names: list[str]) -> list[int]:
        """1, 0 or an error code per object; none at all where that is not known. May hang for
        as long as the library does."""
        if not names:
            return []
        codes = self.call(lambda store: list(store.batch_is_exist(names)), data=False) or []
        self.answered(codes)
        return codes

    def remove(self, names: list[str]) -> list[int] | None:
        """0 or an error code per object; None where it was not tried. Unforced: a forced removal
        under a reader gives him mixed bytes."""
        codes = self.call(lambda store: list(map(int, store.batch_remove(names))), data=False)
        self.answered(codes or ())
        return codes

    def close(self) -> bool:
        """Wait for what is under way, then leave the pool; False if something hangs: then the
        library is left alone, since to close it under a call would be a crash. Idempotent."""
        if os.getpid() != self._pid:
            return True  # it is the parent's
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: not self._running, CLOSING)
        self._prober.join(CLOSING)
        if not idle or self._prober.is_alive():
            log.error("mooncake: a call still hangs at close; its client stays")
            return False
        if first and self._store is not None:
            self._store.close()
        return True

    # -- inside ---------------------------------------------------------------------------

    def _probe(self) -> None:
        """Look for the master while the circuit is open."""
        while True:
            with self._changed:
                due = self.breaker.due()
                if not self._closed and due != 0.0:
                    self._changed.wait(due)
                if self._closed:
                    return
                due = self.breaker.due()
            if due != 0.0:
                continue
            if self._reaches():
                self.breaker.succeeded()
                self._opened.set()
                log.info("mooncake master %s answers", self._master)
            else:
                self.breaker.failed()

    def _reaches(self) -> bool:
        """Does the master answer? Where nobody listens the library is not asked: it would try
        for seconds."""
        try:
            here = self._connect()
            if self._store is None and not self._set_up(self._host or here):
                return False
            return int(self._store.batch_is_exist([PROBE])[0]) >= 0
        except OSError:
            return False
        except Exception:  # the library's: without its prober a client would stay down
            log.exception("mooncake: the probe of master %s failed", self._master)
            return False

    def _connect(self) -> str:
        """The address from which this machine reaches the master. Raises OSError."""
        host, _, port = self._master.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT) as connection:
            return str(connection.getsockname()[0])

    def _set_up(self, host: str) -> bool:
        store = self._library.MooncakeDistributedStore()
        code = store.setup(
            host,
            "P2PHANDSHAKE",
            self._segment,
            0 if self._segment else 16 << 20,
            self._protocol,
            self._devices,
            self._master,
        )
        if code:
            log.warning("mooncake: setup with master %s failed: error %d", self._master, code)
            return False
        with self._changed:
            self._store = store
            regions = list(self._regions)
        for address, nbytes in regions:
            self._register(store, address, nbytes)
        return True

    def _register(self, store: Any, address: int, nbytes: int) -> None:
        if store.register_buffer(address, nbytes):
            log.warning("mooncake: %d bytes of memory cannot be registered", nbytes)
        else:
            self._registered.append((address, nbytes))


def load_library() -> Any:
    """Mooncake's module, made impatient. Raises ConfigError with the commands that install it."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"a tier of kind mooncake needs Mooncake's library ({error}): pip install "
            "'tieredkv[mooncake]' (with CUDA: 'tieredkv[mooncake-cuda]') and apt-get install "
            "libibverbs1 libnuma1 libcurl4"
        ) from error
