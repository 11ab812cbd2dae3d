"""What the scheduler side knows of each request of the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tieredkv.config import ConnectorConfig
from tieredkv.types import Turn

TOOL = "tool_use"


@dataclass(slots=True)
class Inquiry:
    """A question about the chunks of a request that are not known here."""

    keys: Sequence[bytes]
    """The request's chain."""
    known: int
    """Chunks of it that were known."""
    question: Any
    """As of `SharedCatalogue.ask`; None once it is answered."""


@dataclass(slots=True)
class Tracked:
    """One request, from its arrival to its end. `request` is the engine's own object."""

    request: Any
    per_chunk: int
    """Block hashes of the engine in one chunk."""
    turn: Turn
    inquiry: Inquiry | None = None
    """What other engines have of it."""
    begun: bool = False
    """The planner knows that its turn is being served."""
    finishes: bool = False
    """Its session is over when it has ended: another request has said so."""
    keys: list[bytes] = field(default_factory=list)
    """Chunk keys: the engine's chained hash of the last block of each."""
    blocks: list[int] = field(default_factory=list)
    """Engine blocks, from the first token on."""
    computed: int = 0
    """Tokens that the engine had by itself at the latest lookup."""
    saved: int = 0
    """Chunks that are stored or planned."""
    limit: int | None = None
    """Chunks that may be loaded: loading the next one has failed before."""
    loading: bool = False
    active: bool = True
    """It has not ended."""
    ready: bool = False
    """It was scheduled since its latest lookup."""
    base: int = 0
    """Tokens that it counted as computed then: found in the engine or loaded by some connector."""
    fresh: bool = True
    """False: what is computed must not be stored, the cache was reset meanwhile."""
    waiting_since: float | None = None
    """When the next save first found no room."""
    copies: int = 0
    """Copies out of its blocks that have not ended."""
    saved_all: Callable[[], None] | None = None
    """To be called once an ended request has nothing left to save."""
    hits: dict[str, int] = field(default_factory=dict)
    """Tokens of the latest load by tier."""
    shortened: int = 0
    """Tokens that the latest lookup found but left to the engine to compute: that is faster."""
    found: int = 0
    """Chunks that it found, if it left any."""

    def update_keys(self) -> list[bytes]:
        """All chunk keys of the tokens known so far. O(new chunks)."""
        hashes, step, keys = self.request.block_hashes, self.per_chunk, self.keys
        while keys and (len(keys) * step > len(hashes) or hashes[len(keys) * step - 1] != keys[-1]):
            keys.pop()  # a streaming input has replaced the last tokens
        keys.extend(bytes(key) for key in hashes[(len(keys) + 1) * step - 1 :: step])
        return keys

    def settle(self) -> None:
        """Call `saved_all` if it is due."""
        if not self.copies and self.saved_all is not None:
            self.saved_all()
            self.saved_all = None

    def forbid(self, chunk: int) -> None:
        """Loading this chunk has failed: do not offer it to this request again, and store anew
        what it computes instead."""
        self.limit = chunk if self.limit is None else min(self.limit, chunk)
        self.saved = min(self.saved, chunk)

    def distrust(self, invalid: Collection[int], block_tokens: int, chunk_tokens: int) -> None:
        """Engine blocks that could not be loaded are being computed again. A request that goes on
        from them, though not by itself, must not store what rests on them."""
        first = next((i for i, block in enumerate(self.blocks) if block in invalid), None)
        if first is not None:
            self.forbid(first * block_tokens // chunk_tokens)
            if self.request.num_computed_tokens > first * block_tokens:
                self.fresh = False

    def confirmed(self, chunk_tokens: int) -> int:
        """Leading chunks whose KV is computed and whose tokens are certain.

        What is in flight may still turn out to rest on a failed load, or on a rejected draft.
        Before anything was computed on top of them, loaded blocks prove nothing either: a load
        in the step itself may have failed.
        """
        if not (self.ready and self.fresh):
            return 0
        request = self.request
        tokens: int = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        if tokens <= self.base:
            return 0
        return min(tokens // chunk_tokens, len(self.update_keys()))


def turn_of(request: Any) -> Turn:
    """The session and the hints that a request brings: its `session_id`, and in its
    `kv_transfer_params` the keys `session_id`, `category`, `priority` and `ttl`. A priority of
    the engine's own is the other way round: there the lowest comes first."""
    params = params_of(request)
    session = params.get("session_id") or getattr(request, "session_id", None)
    ttl, own = params.get("ttl"), getattr(request, "priority", 0)
    priority = params.get("priority", -own if isinstance(own, int) else 0)
    return Turn(
        session=str(session) if session else None,
        category=_text(params.get("category")),
        priority=priority if isinstance(priority, int) else 0,
        ttl=float(ttl) if isinstance(ttl, int | float) and 0 < ttl <= 365 * 86400 else None,
    )


def parent_of(request: Any) -> str | None:
    """The session whose context the request's session begins with, if the client says so."""
    return _text(params_of(request).get("parent_session"))


def params_of(request: Any) -> dict[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


def ending(request: Any, config: ConnectorConfig) -> dict[str, Any]:
    """Why the turn ended and what follows: told by the client (`category`, `tool`, `pause`),
    else the stop token, else the markers in the output, else only the engine's finish reason."""
    params = params_of(request)
    output = list(getattr(request, "output_token_ids", ()) or ())
    tool = _text(params.get("tool"))
    stop = config.stop_tokens.get(output[-1]) if output else None
    marked = next((config.marker_tokens[t] for t in output if t in config.marker_tokens), None)
    told = _text(params.get("category")) or stop or (TOOL if tool or marked else None)
    told = told or ("pause" if params.get("pause") else None)
    reason = getattr(request, "get_finished_reason", lambda: None)()
    return {
        "finish_reason": told or (str(reason) if reason is not None else None),
        "next_tool": tool or marked,
        "output_tokens": len(output),
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= 256 else None
