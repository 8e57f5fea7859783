"""Packages that are installed into a folder of their own, beside this one."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.documents import ROOT

_BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def install(source: Path, site: Path) -> None:
    """Build the wheel of a source folder, and unpack it into ``site``, without a network."""
    site.mkdir(exist_ok=True)
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(site)],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
    )
    wheel = site / built.stdout.split()[-1]
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    wheel.unlink()


def write_package(
    site: Path, name: str, entry_points: str, modules: Mapping[str, str] | None = None
) -> None:
    """Write an installed package of these modules; ``entry_points`` has groups and lines."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in (modules or {}).items():
        (site / f"{module}.py").write_text(text)


def command(*args: object, site: Path | None = None, module="mlx_packs", **options):
    """Run ``python -m mlx_packs`` with the packages of a site; text of both outputs is captured."""
    paths = [str(ROOT), *([str(site)] if site else [])]
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        **options,
    )
