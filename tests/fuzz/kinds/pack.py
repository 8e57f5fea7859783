"""The folder of a pack, of which every hash may be right."""

from pathlib import Path

from mlx_packs.packs.manifest import ADAPTER_CONFIG, ADAPTERS, MANIFEST, PIN
from tests.fuzz.kind import SUBJECT, Kind, command
from tests.fuzz.subjects import resealed, write_base, write_chats, write_pack_on
from tests.helpers.packs import EVAL

PINNED = b'{"repo": "me/p", "revision": "main", "commit": "0123456789", "manifest_sha256": "0"}'
FACTS = {
    "eval": EVAL,
    "objective": {"loss_on": "completion", "task": "lm", "loss": None},
    "data": {"source": "notes", "rows": {"train": 9, "valid": 2}},
    "recipe": {"max_seq_length": 64, "quantize": "none"},
    "measured": {"created": "2026-01-01T00:00:00", "peak_gb": 0.1},
    "gates": {"max_pack_mb": {"limit": 10.0, "value": 0.1, "passed": True}},
    "sum_of": [{"pack": "a", "weight": 0.5}],
    "license": "mit",
}
COMPARED = ("--model", "base", "--data", "data", "--rows", "1")


class PackKind(Kind):
    """A pack and its base."""

    name = "pack"
    words = "lora dora embedding experts kind head replaced base adapters files".split()
    words += [ADAPTERS]

    def make(self, folder):
        base = write_base(folder.with_name("base"))
        write_chats(folder.with_name("data"))
        write_pack_on(base, folder.with_name("other"), seed=2)
        write_pack_on(base, folder, facts=FACTS)

    def mutate(self, case):
        """Change the manifest; or the tensors, with or without new hashes; or what is beside."""
        names = (MANIFEST, ADAPTERS, "sealed", ADAPTER_CONFIG, PIN, "place")
        part = case.rng.choices(names, (9, 3, 5, 1, 1, 0.5))[0]

        if part == "place":
            case.replace(case.rng.choice((MANIFEST, ADAPTERS, ADAPTER_CONFIG, "README.md")))
        elif part == PIN:
            case.write(PIN, case.mutator.json(PINNED))
        elif part == "sealed":
            case.edit(ADAPTERS)
            manifest = case.files[MANIFEST]
            if case.rng.random() < 0.3:
                manifest = case.mutator.json(manifest)
            data = Path(SUBJECT, ADAPTERS).read_bytes()
            case.write(MANIFEST, resealed(manifest, {ADAPTERS: data}))
        else:
            case.edit(part)
            if part == MANIFEST and case.rng.random() < 0.7:
                case.write(part, resealed(Path(SUBJECT, part).read_bytes()))

    def cheap(self):
        """Return what needs no base, and the check against one."""
        lines = f"""inspect {SUBJECT}
            inspect {SUBJECT} -v --json
            report {SUBJECT} --out out/r.html
            list .
            list --json
            apply {SUBJECT} --model base --dry-run
            diff {SUBJECT} other
            export {SUBJECT} --to peft --out out/a
            export {SUBJECT} --to mlx-lm --out out/a"""
        return [command(*line.split()) for line in lines.splitlines()]

    def whole(self):
        generate = "generate --prompt a --raw --max-tokens 1 --model base --pack"
        return [
            command("apply", SUBJECT, "--model", "base"),
            command(*generate.split(), SUBJECT),
            command("merge", SUBJECT, "--out", "out/m", *COMPARED, gated=True),
            command(
                "combine", f"{SUBJECT}=1", "other=0.5", "--out", "out/c", *COMPARED, gated=True
            ),
        ]
