"""Write the licences of a release's dependencies, from its SBOM (CycloneDX JSON).

    python .ci/licences.py dist/sbom.cdx.json dist/LICENCES.md

A component without a licence, or a path of this machine in the SBOM, ends it with an error.
"""

import base64
import json
import re
import sys
from pathlib import Path

LOCAL = re.compile(r'"(?:file:|/(?:home|tmp|root|work|Users|opt|var)/)[^"]*"')


def names_of(component: dict) -> list[str]:
    """Return the names of a component's licences, as the package declares them."""
    names = []
    for entry in component.get("licenses", ()):
        stated = entry.get("license", {})
        name = entry.get("expression") or stated.get("id") or stated.get("name", "")
        if not name.startswith("declared license "):  # its text, without a name
            names.append(name.removeprefix("License :: ").removeprefix("OSI Approved :: "))
    return list(dict.fromkeys(names))


def texts_of(component: dict) -> list[str]:
    """Return the texts of a component's licence files."""
    texts = []
    for entry in component.get("licenses", ()):
        if text := entry.get("license", {}).get("text"):
            content = text["content"]
            if text.get("encoding") == "base64":
                content = base64.b64decode(content).decode("utf-8", "replace")
            texts.append(content.strip())
    return texts


def document(sbom: dict) -> str:
    """Return the table of all components, and after it their licences' texts.

    Raises:
        ValueError: a component declares no licence.
    """
    components = sorted(sbom["components"], key=lambda c: c["name"].lower())
    lines = [
        "# Licences of the dependencies",
        "",
        "| package | version | licence |",
        "|---|---|---|",
    ]
    for component in components:
        name, version = component["name"], component["version"]
        if not (names := names_of(component)) and not texts_of(component):
            raise ValueError(f"{name} {version}: declares no licence")
        lines.append(f"| {name} | {version} | {', '.join(names) or 'as below'} |")
    for component in components:
        for text in texts_of(component):
            lines += ["", f"## {component['name']} {component['version']}", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


def main(sbom_file: str, out: str) -> None:
    """Write the file; the SBOM must have no path of this machine."""
    text = Path(sbom_file).read_text(encoding="utf-8")
    if paths := LOCAL.findall(text):
        raise ValueError(f"{sbom_file}: has paths of this machine: {paths[:3]}")
    Path(out).write_text(document(json.loads(text)), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"licences: {error}")
