"""Facts of a pack for a page, from its manifest."""

from collections.abc import Mapping
from dataclasses import replace

from ..adapters.spec import leaf_names, ranks_of
from ..bases.files import quantization_name
from ..config.choices import METRICS, TASKS, is_lower_better
from ..display import size
from ..report.facts import (
    MetricChange,
    Page,
    Points,
    loss_name,
    name_alone,
    number,
    rate_name,
    samples_of,
    stored_curve,
    text,
    unit_of,
)
from ..report.page import render_fragment
from ..report.recipe import recipe_sections
from .card import card_command, phase_lines
from .manifest import replaced_of, specs_of, task_of

# Metrics of `eval` for people; others are shown by their keys.
_NAMES = {
    "ppl": "Perplexity",
    "accuracy": "Token accuracy",
    "chosen_ppl": "Perplexity of what is chosen",
    **{name: facts.described for name, facts in METRICS.items()},
}


def manifest_facts(manifest: Mapping, title: str) -> Page:
    """Without the pack's run and without its tensors."""
    measured = _mapping(manifest, "measured")
    result = _mapping(manifest, "eval")
    changes = changes_of(result)

    figures = figures_of(changes, measured)
    if files := manifest.get("files"):
        figures.append(("Size", size(sum(facts["bytes"] for facts in files.values()))))

    base = manifest["base"]
    named = {**manifest, "base": {**base, "id": name_alone(base["id"])}}
    command = text(card_command(named), 400).replace("--pack .", f"--pack {text(title)}")

    return Page(
        title=text(title),
        base=_base_line(manifest),
        figures=figures,
        changes=changes,
        held_out=held_out_line(result),
        curve=stored_curve(manifest),
        unit=unit_of(measured),
        loss_name=loss_name(task_of(manifest)),
        best=number(_mapping(manifest, "end").get("best_batch")),
        samples=samples_of(manifest.get("samples")),
        memory_gb=memory_of(measured),
        recipe=recipe_sections(manifest.get("recipe") or {}),
        phases=[text(line, 400) for line in phase_lines(manifest.get("phases") or ())],
        origins=_origins(manifest),
        command=command,
    )


def notebook_html(manifest: Mapping, title: str, curve: Mapping[str, Points] | None = None) -> str:
    """Name, results and loss curve of a pack; a given curve takes precedence."""
    facts = manifest_facts(manifest, title)
    return render_fragment(replace(facts, curve=curve or facts.curve))


def report_html(report: Mapping, title: str) -> str:
    return render_fragment(Page(title=title, figures=figures_of(changes_of(report), report)))


def changes_of(result: Mapping) -> list[MetricChange]:
    """Every metric that has a value before and one after."""
    changes = []
    for key in result:
        name = key.removesuffix("_before")
        values = [number(result.get(f"{name}_{end}")) for end in ("before", "after")]
        if name == key or None in values:
            continue

        errors = [number(result.get(f"{name}_{end}_se")) for end in ("before", "after")]
        shown = _NAMES.get(name) or text(name, 40).replace("_", " ").capitalize()
        changes.append(MetricChange(shown, *values, *errors, lower_is_better=is_lower_better(name)))

    if answers := _mapping(result, "answers"):
        ends = [_mapping(answers, end) for end in ("before", "after")]
        values = [number(end.get(key)) for key in ("share", "se") for end in ends]
        if None not in values[:2]:
            shown = f"Right answers ({text(answers.get('metric'), 40)})"
            changes.append(MetricChange(shown, *values, lower_is_better=False))
    return changes


def held_out_line(result: Mapping) -> str:
    """How many examples of which split the metrics are of, and what ± means."""
    rows = number(result.get("rows"))
    if rows is None:
        return ""

    line = f"On {rows:,.0f} examples of {text(result.get('split')) or 'the held-out split'}"
    targets = number(result.get("targets"))
    if targets is not None:
        line += f", {targets:,.0f} supervised tokens"
    line += "."
    if (share := number(result.get("commonest_share"))) is not None:
        line += f" The commonest label has {share:.1%} of them."
    if only := text(result.get("predicts_only"), 60):
        line += f" The pack predicts only '{only}'."
    if any(key.endswith("_after_se") for key in result):
        line += " ± is the standard error."
    return line


def figures_of(changes: list[MetricChange], measured: Mapping) -> list[tuple[str, str]]:
    figures = []
    if changes:
        first = changes[0]
        most = max(abs(first.before), abs(first.after))
        digits = 1
        if most < 2:
            digits = 3
        elif most < 100:
            digits = 2
        figures.append((first.name, f"{first.before:,.{digits}f} → {first.after:,.{digits}f}"))
        if first.relative is not None:
            figures.append(("Change", f"{first.relative:+.0%}".replace("-", "−")))

    if (seconds := number(measured.get("train_s"))) is not None:
        figures.append(("Training time", _duration(seconds)))

    for unit in ("tokens", "pairs"):
        if (rate := number(measured.get(f"{unit}_per_s"))) is not None:
            figures.append((rate_name(unit), f"{rate:,.0f}"))
    return figures


def memory_of(measured: Mapping) -> list[tuple[str, float]]:
    names = {
        "plan_peak_gb": "planned",
        "peak_gb": "measured (MLX)",
        "process_peak_gb": "whole process",
    }
    amounts = {name: number(measured.get(key)) for key, name in names.items()}
    return [(name, amount) for name, amount in amounts.items() if amount is not None and amount > 0]


def _mapping(values: Mapping, key: str) -> Mapping:
    part = values.get(key)
    return part if isinstance(part, Mapping) else {}


def _base_line(manifest: Mapping) -> str:
    full = f"{len(replaced_of(manifest))} tensors fine-tuned in full"
    what = full
    if specs := specs_of(manifest):
        ranks = ", ".join(map(str, ranks_of(specs)))
        what = f"LoRA of rank {ranks} on {', '.join(leaf_names(specs)[:10])}"
        if replaced_of(manifest):
            what += f", {full}"

    base = manifest["base"]
    kind = quantization_name(base["quantization"])
    return text(
        f"{name_alone(base['id'])} ({base['model_type']}, {base['num_layers']} blocks, {kind}) · "
        f"{what} · {manifest['adapters']['parameters']:,} parameters",
        400,
    )


def _origins(manifest: Mapping) -> list[tuple[str, str]]:
    measured, objective, data, versions = (
        _mapping(manifest, key) for key in ("measured", "objective", "data", "versions")
    )

    counts = _mapping(data, "rows").items()
    rows = ", ".join(f"{count:,} {text(split)}" for split, count in counts)

    task = text(objective.get("task"))
    gates = ", ".join(
        f"{text(name)} {gate['value']:.4g} of {gate['limit']:.4g} "
        f"({'passed' if gate['passed'] else 'failed'})"
        for name, gate in (manifest.get("gates") or {}).items()
    )

    origins = [
        ("created", text(measured.get("created"))),
        ("task", task if task in TASKS else ""),
        ("loss on", text(objective.get("loss_on"))),
        ("data", " · ".join(filter(None, (name_alone(data.get("source")), rows)))),
        *(
            (f"data, {text(split, 40)}", text(value))
            for split, value in list(_mapping(data, "fingerprint").items())[:20]
        ),
        ("base", text(manifest["base"]["fingerprint"])),
        ("device", text(versions.get("device"))),
        (
            "versions",
            ", ".join(f"{text(k, 40)} {text(v)}" for k, v in versions.items() if k != "device"),
        ),
        ("matmul path", text(measured.get("matmul_path"))),
        ("gates", gates),
        ("licence", text(manifest.get("license"))),
    ]

    return [(name, value) for name, value in origins if value]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
