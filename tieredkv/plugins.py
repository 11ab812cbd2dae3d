"""Plug-ins by reference: a built-in name, an entry point of another package, `module:Class`.

Loading runs the plug-in's import-time code in the caller's thread. Nothing is cached here;
Python's own module cache makes the second load cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

from tieredkv.errors import PluginError
from tieredkv.suggest import nearest

TIERS = "tieredkv.tiers"
POLICIES = "tieredkv.policies"
ADMISSIONS = "tieredkv.admissions"


def entry_points(group: str) -> dict[str, dict[str, str]]:
    """Entry points of installed packages: name -> {`module:Class`: distributions}.

    More than one inner key means that packages disagree about the name.
    """
    from importlib import metadata  # slow to import and rarely needed

    found: dict[str, dict[str, str]] = {}
    for point in metadata.entry_points(group=group):
        owners = found.setdefault(point.name, {})
        owner = point.dist.name if point.dist else "an unnamed distribution"
        if owner not in owners.get(point.value, "").split(", "):
            owners[point.value] = ", ".join(filter(None, (owners.get(point.value), owner)))
    return found


def unknown_plugin(group: str, ref: str, builtin: Iterable[str]) -> str | None:
    """Why `ref` can name no plug-in of `group`, with the nearest name; None if it can.

    Imports no plug-in: `module:Class` is believed until `load_plugin`.
    """
    builtin = tuple(builtin)
    if ref in builtin or ":" in ref:
        return None
    names = {*builtin, *entry_points(group)}
    if ref in names:
        return None
    hint = f"; nearest valid name: {nearest(ref, names)!r}" if names else ""
    return f"{ref!r} is no built-in and no entry point in group {group!r}{hint}"


def load_plugin(group: str, ref: str, builtin: Mapping[str, type]) -> type:
    """The class that `ref` names; the caller checks and constructs it.

    Order: `builtin`, then `module:Class` if there is a colon, then entry points of `group`.
    An entry point cannot replace a built-in. Raises PluginError with `ref` and the cause.
    """
    if ref in builtin:
        return builtin[ref]
    if ":" in ref:
        return _resolve(group, ref, ref)
    if reason := unknown_plugin(group, ref, builtin):
        raise PluginError(f"plug-in {reason}, or write module:Class")
    targets = entry_points(group)[ref]
    if len(targets) > 1:
        listed = "; ".join(f"{target} from {owner}" for target, owner in sorted(targets.items()))
        raise PluginError(
            f"plug-in {ref!r} (group {group}) is ambiguous: {listed}; "
            "uninstall all but one, or write module:Class"
        )
    return _resolve(group, ref, next(iter(targets)))


def _resolve(group: str, ref: str, target: str) -> type:
    module_name, _, path = target.partition(":")
    what = f"plug-in {ref!r} (group {group})"
    if target != ref:
        what = f"plug-in {ref!r} (group {group}, entry point {target})"
    if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise PluginError(f"{what}: {target!r} is not of the form module:Class")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # import runs foreign code: anything can come out of it
        raise PluginError(
            f"{what}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except Exception as error:  # a module's __getattr__ is foreign code as well
            names = (name for name in dir(found) if not name.startswith("_"))
            raise PluginError(
                f"{what}: {module_name!r} has no usable attribute {path!r} "
                f"({type(error).__name__}: {error}); nearest: {nearest(part, names)!r}"
            ) from error
    if not isinstance(found, type):
        raise PluginError(f"{what}: {target!r} is a {type(found).__name__}, not a class")
    return found
