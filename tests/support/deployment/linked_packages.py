"""Installed packages lent to another environment as hard links, so that pip need not unpack gigabytes again."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def lend_packages(requirements: Iterable[str], site_packages: Path) -> None:
    """Link what `requirements` lead to, as far as it is installed here, into a new environment's `site_packages`.

    Nothing else: what imports a package that nobody asks for fails there. pip, which replaces files rather than writes
    into them, still decides whether versions fit, and installs what is missing.
    """
    own = {canonicalize_name(found.name) for found in distributions(path=[str(site_packages)])}
    for found in _closure(requirements):
        if canonicalize_name(found.name) not in own:
            _link(found, site_packages)


def _closure(requirements: Iterable[str]) -> list[Distribution]:
    """The installed distributions that requirements name, and those that these name in turn."""
    seen: dict[tuple[str, str], Distribution | None] = {}
    open_requirements = [Requirement(text) for text in requirements]
    while open_requirements:
        requirement = open_requirements.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key in seen:
                continue
            try:
                seen[key] = found = distribution(requirement.name)
            except PackageNotFoundError:
                seen[key] = None
                continue
            needs = map(Requirement, found.requires or ())
            open_requirements += [
                need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})
            ]
    return list({found.name: found for found in seen.values() if found is not None}.values())


def _link(found: Distribution, site_packages: Path) -> None:
    root = Path(str(found.locate_file("")))
    made: set[Path] = set()
    for name, *_ in csv.reader((found.read_text("RECORD") or "").splitlines()):
        if name.startswith("..") or not os.path.exists(root / name):  # scripts name the interpreter
            continue
        target = site_packages / name
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        try:
            os.link(root / name, target)
        except OSError:  # on another disk
            shutil.copy(root / name, target)
