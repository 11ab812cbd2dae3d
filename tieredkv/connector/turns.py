"""What the planner is told of sessions: when a turn of theirs begins and ends.

A request without a session is the next turn of the session whose chain it goes on from, or
else begins one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tieredkv.config import ConnectorConfig
from tieredkv.connector.requests import Tracked, ending, params_of, parent_of
from tieredkv.connector.shipping import Shipping


def arrived(shipping: Shipping, tracked: Tracked) -> None:
    """The request is in the engine's queue."""
    with shipping.lock:
        shipping.planner.queued(_session(shipping, tracked), shipping.clock())


def began(shipping: Shipping, tracked: Tracked) -> None:
    """The engine has come to the request. Repeatable."""
    if not tracked.begun:
        with shipping.lock:
            shipping.planner.turn_began(_session(shipping, tracked), shipping.clock())
        tracked.begun = True


def ended(
    shipping: Shipping, tracked: Tracked, config: ConnectorConfig, live: Iterable[Tracked]
) -> None:
    """The request has been served and its last chunk is stored; `live` have not ended."""
    session, params = tracked.turn.session, params_of(tracked.request)
    if session is None:
        return
    others = [other for other in live if other.turn.session == session]
    with shipping.lock:
        planner, now = shipping.planner, shipping.clock()
        if not others:  # if its next turn is here, it does not wait
            planner.turn_ended(session, now, **ending(tracked.request, config))
        if params.get("abandon") is True:
            planner.abandon(tracked.keys, now)
        if params.get("finish") or tracked.finishes:
            if others:
                others[-1].finishes = True  # the last of them says it
            else:
                planner.end_session(session, now)


def _session(shipping: Shipping, tracked: Tracked) -> str:
    """The request's session, from now on by name. The lock is held."""
    planner, session = shipping.planner, tracked.turn.session
    if session is None:
        session = planner.session_of(tracked.update_keys())
        session = session or f"request:{tracked.request.request_id}"
        tracked.turn = replace(tracked.turn, session=session)
    parent = parent_of(tracked.request)
    if parent is not None:
        planner.fork(parent, session, shipping.clock())
    return session
