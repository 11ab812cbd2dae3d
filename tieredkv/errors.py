"""Every exception of the library, one tree.

TieredKVError
├── ConfigError          a configuration value, file or environment variable is wrong
│   └── PluginError      a tier, policy or admission plug-in cannot be loaded
├── UsageError           a call of the public API breaks its contract
│   ├── BlockSizeError   buffers that are not one store block each
│   └── ClosedError      the store has been closed
├── DirectoryError       an NVMe directory cannot be used
│   ├── DirectoryInUse   another live process owns it
│   └── FormatError      it was written by another format version or geometry
└── CapacityError        a tier is too small to hold a single block

Exceptions are for misuse and for what cannot start; what happens to a block is an
`Outcome`. Each message names the offending value and the remedy.
"""

from __future__ import annotations


class TieredKVError(Exception):
    """Base of all errors raised by this library."""


class ConfigError(TieredKVError):
    """A configuration value, file or environment variable is wrong."""


class PluginError(ConfigError):
    """A plug-in named in the configuration failed to load."""


class UsageError(TieredKVError, ValueError):
    """A call of the public API breaks its contract; nothing was changed."""


class BlockSizeError(UsageError):
    """Buffers that do not hold exactly one store block each."""


class ClosedError(UsageError):
    """The store has been closed."""


class DirectoryError(TieredKVError):
    """An NVMe directory cannot be used."""


class DirectoryInUse(DirectoryError):
    """Another live process, or another store of this one, owns the directory."""


class FormatError(DirectoryError):
    """The directory was written with another format version or geometry."""


class CapacityError(TieredKVError):
    """A tier is too small to hold a single block."""
