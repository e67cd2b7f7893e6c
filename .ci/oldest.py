"""Constraints for pip with the oldest release of each package that a wheel allows: `python oldest.py WHEEL`."""

import sys
import zipfile
from email.parser import Parser

from packaging.requirements import Requirement


def oldest(wheel: str) -> list[str]:
    """A line for each requirement with a lower bound, `name==bound`, with its marker. Those of extras are left out."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    lines = []
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        if requirement.marker and "extra" in str(requirement.marker):
            continue
        marker = f"; {requirement.marker}" if requirement.marker else ""
        lines += [f"{requirement.name}=={bound.version}{marker}" for bound in requirement.specifier if bound.operator == ">="]
    return lines


if __name__ == "__main__":
    print(*oldest(sys.argv[1]), sep="\n")
