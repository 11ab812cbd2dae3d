"""Where the kernel tells things."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")
DEV = Path("/dev")
BOOT = Path("/boot")


def text(path: Path) -> str:
    """What is in a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def has_nvidia() -> bool:
    """Whether NVIDIA's driver is loaded, without asking it."""
    return (DEV / "nvidiactl").exists()
