"""Installed plug-in packages, as far as importlib.metadata can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

DISTRIBUTIONS = {
    "alpha": {
        "tieredkv.tiers": {"twice": "json:JSONDecoder", "shelf": "json:JSONDecoder"},
        "tieredkv.policies": {"coin": "json:JSONEncoder"},
        "tieredkv.admissions": {"picky": "json:JSONEncoder"},
    },
    "beta": {"tieredkv.tiers": {"twice": "json:JSONEncoder", "shelf": "json:JSONDecoder"}},
}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for name, groups in DISTRIBUTIONS.items():
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
    (site / "broken_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(site)
