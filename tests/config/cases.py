"""One case per configuration error: what is done, and the start of what must be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tieredkv.config import Config
from tieredkv.config_file import MAX_BYTES, parse_yaml
from tieredkv.config_load import load, parse
from tieredkv.errors import CapacityError, ConfigError, PluginError, TieredKVError
from tieredkv.plugins import TIERS, load_plugin

OK = "tiers: [{kind: dram, capacity: 1MiB}, {kind: nvme, path: /x, capacity: 1GiB}]"


@dataclass(frozen=True)
class Case:
    name: str
    act: Callable[[Path], Any]
    says: tuple[str, ...]
    """A part of each line of the message, in any order; no line more, no line less."""
    error: type[TieredKVError] = ConfigError
    env: dict[str, str] = field(default_factory=dict)


def doc(name: str, text: str, *says: str, **more: Any) -> Case:
    env = more.get("env", {})
    return Case(name, lambda _: parse(parse_yaml(text, "t"), "file t.yaml", env), says, **more)


def tier(name: str, text: str, *says: str) -> Case:
    return doc(name, f"tiers: [{text}]", *(f"file t.yaml: {line}" for line in says))


def python(name: str, value: Any, *says: str) -> Case:
    return Case(name, lambda _: Config.model_validate(value), says)


def file(name: str, content: bytes | str, *says: str, suffix: str = ".yaml") -> Case:
    def act(tmp: Path) -> None:
        path = tmp / f"f{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        load(path, {})

    return Case(name, act, says)


def plugin(name: str, ref: str, *says: str) -> Case:
    return Case(name, lambda _: load_plugin(TIERS, ref, {"dram": int}), says, PluginError)


SIZE = "give bytes or a text such as 512MiB or 40GiB"

UNKNOWN = [
    doc(
        "key at the top",
        f"{OK}\nblock_tokes: 16",
        "file t.yaml: unknown key 'block_tokes' at block_tokes; nearest valid key: 'block_tokens'",
    ),
    tier(
        "key in a tier",
        "{kind: dram, capacity: 1, cop_threads: 2}",
        "unknown key 'cop_threads' at tiers[0].cop_threads; nearest valid key: 'copy_threads'",
    ),
    tier(
        "key in a tier's section",
        "{kind: dram, capacity: 1, eviction: {polcy: lru}}",
        "unknown key 'polcy' at tiers[0].eviction.polcy; nearest valid key: 'policy'",
    ),
    doc(
        "key in a section",
        f"{OK}\nmover: {{thread: 1}}",
        "file t.yaml: unknown key 'thread' at mover.thread; nearest valid key: 'threads'",
    ),
    python(
        "key from python",
        {"tiers": [{"kind": "dram", "capacity": 1}], "Events": 3},
        "python: unknown key 'Events' at Events; nearest valid key: 'events'",
    ),
    Case(
        "key from an engine's configuration",
        lambda _: parse({**parse_yaml(OK, "t"), "pin_tll": 3}, "kv_connector_extra_config"),
        (
            "kv_connector_extra_config: unknown key 'pin_tll' at pin_tll; "
            "nearest valid key: 'pin_ttl'",
        ),
    ),
    doc(
        "variable",
        OK,
        "env TIEREDKV_TIERS_0_CAPACTY: unknown variable; "
        "nearest valid name: 'TIEREDKV_TIERS_0_CAPACITY'",
        env={"TIEREDKV_TIERS_0_CAPACTY": "1GiB"},
    ),
    doc(
        "variable in lower case",
        OK,
        "env tieredkv_events: unknown variable; nearest valid name: 'TIEREDKV_EVENTS'",
        env={"tieredkv_events": "1"},
    ),
    doc(
        "variable of a tier that is not there",
        OK,
        "env TIEREDKV_TIERS_2_CAPACITY: unknown variable; nearest valid name: 'TIEREDKV_TIERS_",
        env={"TIEREDKV_TIERS_2_CAPACITY": "1GiB"},
    ),
    tier(
        "kind",
        "{kind: drams, capacity: 1, copy_threads: 0}",
        "tiers[0].kind: 'drams' is no built-in and no entry point in group 'tieredkv.tiers'; "
        "nearest valid name: 'dram'",
    ),
    doc(
        "policy",
        f"{OK}\neviction: {{policy: lruu}}",
        "file t.yaml: eviction.policy = 'lruu': 'lruu' is no built-in and no entry point in group "
        "'tieredkv.policies'; nearest valid name: 'lru'",
    ),
    tier(
        "admission",
        "{kind: nvme, path: /x, capacity: 1, admission: bogus}",
        "tiers[0].admission = 'bogus': 'bogus' is no built-in and no entry point in group "
        "'tieredkv.admissions'",
    ),
]

VALUES = [
    doc("no tiers", "events: 1", "file t.yaml: tiers is missing; add this key"),
    doc("empty tiers", "tiers: []", "file t.yaml: tiers is empty; name at least one"),
    doc("tiers no list", "tiers: {a: 1}", "file t.yaml: tiers = {'a': 1}: must be a list"),
    doc("section no mapping", f"{OK}\nmover: 5", "mover = 5: must be a mapping of keys to values"),
    doc(
        "section no mapping under a variable",
        f"{OK}\nmover: 5",
        "file t.yaml: mover = 5: must be a mapping of keys to values",
        env={"TIEREDKV_MOVER_THREADS": "2"},
    ),
    tier("tier no mapping", "fast", "tiers[0].kind: 'fast' is not a mapping such as"),
    tier("no kind", "{capacity: 1}", "tiers[0].kind is missing; say which kind of tier this is"),
    tier("kind no text", "{kind: 5, capacity: 1}", "tiers[0].kind: 5 is not a text"),
    tier("no capacity", "{kind: dram}", "tiers[0].capacity is missing; add this key"),
    tier("no path", "{kind: nvme, capacity: 1}", "tiers[0].path is missing; add this key"),
    tier(
        "key no text",
        "{kind: dram, capacity: 1, 3: 4}",
        "keys must be strings, got 3 at tiers[0][3]",
    ),
    tier(
        "unit",
        "{kind: dram, capacity: 4 foo}",
        "tiers[0].capacity = '4 foo': could not interpret byte unit: foo",
    ),
    tier("zero", "{kind: dram, capacity: 0}", "tiers[0].capacity = 0: input should be greater"),
    tier(
        "name",
        "{kind: dram, capacity: 1, name: A b}",
        "tiers[0].name = 'A b': string should match pattern",
    ),
    tier(
        "choice",
        "{kind: nvme, path: /x, capacity: 1, write: never}",
        "tiers[0].write = 'never': input should be 'on_evict', 'through' or 'off'",
    ),
    doc(
        "number",
        f"{OK}\nmover: {{threads: 0, get_deadline: .inf}}\npin_ttl: 1.0e+30",
        "mover.threads = 0: input should be greater than or equal to 1",
        "mover.get_deadline = inf: input should be a finite number",
        "pin_ttl = 1e+30: input should be less than or equal to 31536000",
    ),
    doc(
        "number in a variable",
        OK,
        "env TIEREDKV_BLOCK_TOKENS: block_tokens = 'many': input should be a valid integer",
        env={"TIEREDKV_BLOCK_TOKENS": "many"},
    ),
    doc(
        "empty variable",
        OK,
        f"env TIEREDKV_BLOCK_BYTES: block_bytes = '': {SIZE}",
        env={"TIEREDKV_BLOCK_BYTES": ""},
    ),
    python("document no mapping", 5, "python: must be a mapping of keys to values, got 5"),
    *(
        doc(f"size {value[:9]}", f"tiers: [{{kind: dram, capacity: {value}}}]", says)
        for value, says in {
            "[1]": f"tiers[0].capacity = [1]: {SIZE}",
            "true": f"tiers[0].capacity = True: {SIZE}",
            ".inf": f"tiers[0].capacity = inf: {SIZE}",
            ".nan": f"tiers[0].capacity = nan: {SIZE}",
            "1.5": f"tiers[0].capacity = 1.5: {SIZE}",
            "-1": f"tiers[0].capacity = -1: {SIZE}",
            "null": f"tiers[0].capacity = None: {SIZE}",
            "large": f"tiers[0].capacity = 'large': {SIZE}",
            "9" * 400: f"tiers[0].capacity = {'9' * 18}...{'9' * 19}: input should be less than",
            f"'{'9' * 400}.5'": f"= '{'9' * 12}...{'9' * 11}.5': {SIZE}",
            "'1,000GiB'": f"tiers[0].capacity = '1,000GiB': {SIZE}",
            "40GiB/s": f"tiers[0].capacity = '40GiB/s': {SIZE}",
        }.items()
    ),
]

TIER_RULES = [
    tier(
        "same kind twice",
        "{kind: dram, capacity: 1}, {kind: dram, capacity: 1}",
        "tiers[1].name = 'dram' is also the name of tiers[0]; give each tier a name of its own",
    ),
    tier(
        "hbm not first",
        "{kind: dram, capacity: 1}, {kind: hbm, capacity: 1}",
        "tiers[1] is hbm, the fastest kind: there can be one, and it must be first",
    ),
    tier(
        "nvme not last",
        "{kind: nvme, path: /x, capacity: 1}, {kind: nvme, name: b, path: /y, capacity: 1}",
        "tiers[0] is nvme, the slowest kind: there can be one, and it must be last",
    ),
    doc(
        "two pools",
        "tiers: [{kind: mooncake, master: 'a:1'}, {kind: mooncake, master: 'b:1', name: two}]",
        "file t.yaml: tiers[1] is a second mooncake: there can be one; remove it",
    ),
    tier(
        "small segment",
        "{kind: mooncake, master: 'a:1', segment: 1MiB}",
        "tiers[0].segment = '1MiB': is too small: pass 0, or 16MiB or more",
    ),
    doc(
        "no room for a block",
        f"{OK}\nblock_bytes: 2MiB",
        "tiers[0].capacity = 1048576 holds no block of block_bytes = 2097152; raise",
        error=CapacityError,
    ),
]

FILES = [
    Case("no file named", lambda _: load(None, {}), ("no configuration: pass a file or set",)),
    Case("missing", lambda tmp: load(tmp / "none.yaml", {}), ("No such file or directory",)),
    Case("directory", lambda tmp: load(tmp, {}), ("cannot be read: Is a directory",)),
    Case(
        "missing, named by the variable",
        lambda _: load(None, {"TIEREDKV_CONFIG_FILE": "/nonexistent/a.yaml"}),
        ("file /nonexistent/a.yaml: cannot be read: No such file",),
    ),
    file("empty", "", "is empty; it must at least name tiers"),
    file("only comments", "# nothing\n", "is empty; it must at least name tiers"),
    file("empty JSON", " ", "is empty; it must at least name tiers", suffix=".json"),
    file("binary", b"\x93NUMPY\xff\x00", "not a text file in UTF-8"),
    file("control characters", b"tiers:\0 []", "not valid YAML: "),
    file("too large", b"#" * (MAX_BYTES + 1), "larger than 1048576 bytes"),
    file("list", "[1, 2]", "holds a list, not a mapping of keys to values"),
    file("text", "hello", "holds a str, not a mapping of keys to values"),
    file("syntax", "tiers: [\n", "f.yaml line 2 column 1: not valid YAML: "),
    file("object", "tiers: !!python/object:os.system []", "not valid YAML: could not determine"),
    file("impossible date", "a: 2024-99-99", "not valid YAML: month must be in 1..12"),
    file("deep", "[" * 5000, "nested too deeply"),
    file("key twice", f"{OK}\n{OK}", "line 2 column 1: not valid YAML: duplicate key 'tiers'"),
    file(
        "key twice, inside",
        "tiers: [{kind: dram, capacity: 1, capacity: 2}]",
        "line 1 column 35: not valid YAML: duplicate key 'capacity'; keep one",
    ),
    file("JSON syntax", "{", "f.json line 1 column 2: not valid JSON: ", suffix=".json"),
    file(
        "JSON key twice",
        '{"tiers": [], "tiers": []}',
        "not valid JSON: duplicate key 'tiers'; keep one",
        suffix=".json",
    ),
    file("JSON deep", "[" * 200_000, "nested too deeply", suffix=".json"),
]

PLUGINS = [
    plugin(
        "unknown",
        "dra",
        "plug-in 'dra' is no built-in",
    ),
    plugin("no module", "no_such_pkg:Tier", "importing 'no_such_pkg' failed: ModuleNotFoundError"),
    plugin("broken module", "broken_plugin:Tier", "failed: ZeroDivisionError: division by zero"),
    plugin("no attribute", "json:JSONDecodr", "no usable attribute 'JSONDecodr'"),
    plugin(
        "no class", "json:dumps", "plug-in 'json:dumps' (group tieredkv.tiers): 'json:dumps' is"
    ),
    plugin("no attribute named", "json:", "'json:' is not of the form module:Class"),
    plugin("no module named", ":Tier", "':Tier' is not of the form module:Class"),
    plugin(
        "ambiguous",
        "twice",
        "plug-in 'twice' (group tieredkv.tiers) is ambiguous: json:JSONDecoder from alpha; "
        "json:JSONEncoder from beta; uninstall all but one",
    ),
]

CASES = [*UNKNOWN, *VALUES, *TIER_RULES, *FILES, *PLUGINS]
