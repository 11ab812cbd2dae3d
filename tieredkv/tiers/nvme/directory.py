"""The directory of one fingerprint: its name, its locks, and its share of the root.

    <root>/<fingerprint digest in hex>/fingerprint.json   what the name means
                                       LOCK               flock of who owns the index
                                       index/             see tieredkv.index.durable
                                       rank-<r>/LOCK      flock of who owns the segments
                                       rank-<r>/seg-000000.kv ...
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tieredkv.errors import DirectoryError, FormatError
from tieredkv.index.damage import sync_directory
from tieredkv.keys import fingerprint_digest
from tieredkv.tiers.nvme.lock import FileLock
from tieredkv.tiers.nvme.usage import MARKER, disk_usage, is_ours, read_marker, reclaim
from tieredkv.types import Fingerprint

FORMAT = 1
ROOT_LOCK = "tieredkv.lock"
GROWTH_WAIT = 5.0
TEMPORARY = re.compile(r"(seg-\d{6}\.kv|fingerprint\.json|probe)(\.tmp)|probe\.tmp")
LEFTOVER = re.compile(r"index\.corrupt-\d+|seg-\d{6}\.kv\.quarantine(-\d+)?")
