"""The model card of a pack: its manifest in Markdown, with the metadata that the Hub reads."""

import html
import json
import re
from collections.abc import Mapping

from ..report.facts import progress_series, samples_of, stored_curve, thinned
from ..report.recipe import recipe_sections
from ..terminal import printable_text
from .facts import card_command, has_images, pack_rows
from .manifest import HUB_ID, architecture_facts, pack_facts, task_of


def model_card(manifest: dict, name: str) -> str:
    kind = "pack"
    if described := pack_facts(manifest).described:
        kind = f"pack that is {described} (`--task {task_of(manifest)}`)"
    if manifest["adapters"]["modules"]:
        kind = f"LoRA {kind}"

    lines = [
        "",
        f"# {name}",
        "",
        f"A {kind} for `{manifest['base']['id']}`.",
        "",
        *(f"- {label}: {value}" for label, value in pack_rows(manifest)),
        *("", "```", card_command(manifest), "```", ""),
    ]
    samples = len(lines)
    lines += [*_curve(manifest), *_recipe(manifest)]
    lines = [line.replace("<", "&lt;") for line in lines]  # no name or value is a tag
    lines[samples:samples] = _samples(manifest)
    return printable_text("\n".join([*_metadata(manifest), *lines]) + "\n")


def _metadata(manifest: dict) -> list[str]:
    """The YAML that the Hub reads; a base is named there only if it is a hub id."""
    base = manifest["base"]["id"]
    is_lora = bool(manifest["adapters"]["modules"])
    lines = ["---", "library_name: mlx"]

    if license := manifest.get("license"):
        lines.append(f"license: {json.dumps(license)}")

    if re.fullmatch(HUB_ID, base, re.ASCII):
        lines.append(f"base_model: {json.dumps(base)}")
        lines.append(f"base_model_relation: {'adapter' if is_lora else 'finetune'}")

    task = "image-text-to-text" if has_images(manifest) else architecture_facts(manifest).hub_task
    task = pack_facts(manifest).hub or task
    lines.append(f"pipeline_tag: {task}")

    tags = ["mlx", "mlx-packs"]
    if is_lora:
        tags.insert(1, "lora")
    return [*lines, f"tags: [{', '.join(tags)}]", "---"]


def _samples(manifest: Mapping) -> list[str]:
    lines = []
    for sample in samples_of(manifest.get("samples")):
        parts = {"Prompt": sample.prompt, "Expected": sample.wanted}
        parts |= {"Base model": sample.before, "With the pack": sample.after}

        for name, content in parts.items():
            if content:
                lines += [f"{name}:", "", f"<pre>{html.escape(content, quote=False)}</pre>", ""]

    if not lines:
        return []
    return ["## Sample", "", *lines]


def _curve(manifest: Mapping) -> list[str]:
    curve = stored_curve(manifest)
    names = progress_series(curve)
    training, valid = (dict(thinned(curve.get(name, []), 10)) for name in names)
    batches = sorted({*training, *valid})
    if len(batches) < 2:
        return []

    rows = [
        f"| {batch:,.0f} | {_decimals(training.get(batch))} | {_decimals(valid.get(batch))} |"
        for batch in batches
    ]
    measure = names[0]
    heads = [f"| batch | training {measure} | validation {measure} |", "|---:|---:|---:|"]
    return [f"## {measure.capitalize()}", "", *heads, *rows, ""]


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _recipe(manifest: Mapping) -> list[str]:
    rows = [
        f"| {name} | {_cell(value)} |"
        for _, settings in recipe_sections(manifest.get("recipe") or {})
        for name, value, differs in settings
        if differs
    ]

    if not rows:
        return []
    note = "Settings that differ from the defaults; `pack.json` has all of them."
    return ["## Recipe", "", note, "", "| setting | value |", "|---|---|", *rows, ""]


def _cell(value: str) -> str:
    """Code in a cell of a table; a text of several lines becomes one."""
    shown = " ".join(value.split()).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else ""
