"""What other engines have stored in a pool: asked once per request, from its arrival on."""

from __future__ import annotations

from tieredkv.connector.requests import Inquiry, Tracked
from tieredkv.connector.shipping import Shipping

MOMENT = 0.003
"""Seconds. An answer takes less as a rule, and to come back for it after the engine's next step
takes ten times as long."""


def ask(shipping: Shipping, tracked: Tracked) -> None:
    """Begin to ask about the request. Repeatable."""
    if tracked.inquiry is None and shipping.shared is not None:
        keys = tuple(tracked.update_keys())
        unknown = shipping.unknown(keys)
        question = shipping.shared.ask(unknown)
        tracked.inquiry = Inquiry(keys, len(keys) - len(unknown), question)


def answered(shipping: Shipping, tracked: Tracked) -> bool:
    """Is it known what others have of the request? Then it is in the planner. Waits for a moment
    at most."""
    ask(shipping, tracked)
    inquiry, shared = tracked.inquiry, shipping.shared
    if shared is None or inquiry is None or inquiry.question is None:
        return True
    found = shared.answer(inquiry.question, wait=MOMENT)
    if found is None:
        return False
    inquiry.question = None
    shipping.adopt(inquiry.keys[: inquiry.known + found], found)
    return True
