"""Quality of the projection stack: the same examples and steps as the full forward pass, evaluated by it.

A small Llama with square o_proj and an untied head is first trained on Python's documentation (the
texts in `pydoc`), then adapted to the passages under each objective. Perplexities are those of
held-out examples in the full forward pass; the proxy's is that of the trained graph.

    python -m benchmarks.objectives [--iters 200] [--write]

The figures do not depend on the machine, except for the order of float32 sums.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.packs.making import versions_line
from mlx_packs.runtime import mx

from .workloads import PASSAGES

DOC = Path(__file__).parents[1] / "docs" / "systems.md"
BEGIN, END = "<!-- objectives -->", "<!-- end of objectives -->"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
ROWS, LENGTH = 16, 128
WAYS = {
    "transformer, all projections": ("transformer", ()),
    "transformer, the stack's own": ("transformer", ("o_proj", "lm_head")),
    "transformer, only the head": ("transformer", ("lm_head",)),
    "projection-stack": ("projection-stack", ()),
}


def write_base(folder: Path, updates: int, seed: int = 0) -> float:
    """A checkpoint that has read Python's documentation; its last training loss."""
    from pydoc_data.topics import topics

    from mlx_lm.models import llama

    tokenizer = load_base("tiny", lazy=True).tokenizer
    texts = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = np.array(tokenizer.encode(texts), np.int32)
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    rate = optimizers.cosine_decay(2e-3, updates)
    optimizer = optimizers.AdamW(learning_rate=rate)
    step = nn.value_and_grad(
        model,
        lambda rows: nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean"),
    )
    starts = np.random.default_rng(seed).integers(0, len(tokens) - LENGTH - 1, (updates, ROWS))
    for each in starts:
        loss, grads = step(mx.array(np.stack([tokens[s : s + LENGTH + 1] for s in each])))
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_checkpoint() / name, folder)
    return loss.item()


def table(base: Path, workload: Path, iters: int, rate: float) -> list[str]:
    """A row for each objective."""
    lines = [
        "| objective | trainable parameters | PPL before | PPL after | proxy PPL before | proxy PPL "
        "after | peak |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (objective, targets) in WAYS.items():
        out = workload / name.replace(" ", "-").replace(",", "").replace("'", "")
        train = TrainConfig(
            iters=iters,
            batch_size=8,
            max_seq_length=256,
            learning_rate=rate,
            objective=objective,
            steps_per_eval=10**6,
            save_every=10**6,
        )
        lora = LoRAConfig(rank=16, target_modules=targets)
        run = train_pack(str(base), str(PASSAGES), lora, train, out=out)
        report, own = run.report, run.report["objective"]
        before, after = own.get("ppl_before"), own.get("ppl_after")
        shown = "same | same" if before is None else f"{before:,.0f} | {after:,.0f}"
        lines.append(
            f"| {name} | {run.pack.manifest['adapters']['parameters']:,} | "
            f"{report['ppl_before']:.1f} ± {report['ppl_before_se']:.1f} | "
            f"{report['ppl_after']:.1f} ± {report['ppl_after_se']:.1f} | {shown} | "
            f"{1000 * report['peak_gb']:.0f} MB |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--pretraining", type=int, default=800, help="updates on documentation")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/systems.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        workload = Path(name)
        loss = write_base(workload / "base", options.pretraining)
        print(f"base: loss {loss:.2f} on documentation", flush=True)
        results = table(workload / "base", workload, options.iters, options.learning_rate)
    versions = " · ".join(f"{k} {v}" for k, v in versions_line().items())
    results += [
        "",
        f"{options.iters} batches of 8 examples, rank 16, learning rate {options.learning_rate:g}; the "
        f"base model (4 blocks of 128, vocabulary 4096) has a loss of {loss:.2f} on its "
        f"pretraining text. {versions}.",
    ]
    if options.write:
        text = DOC.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        DOC.write_text(before + "\n".join([BEGIN, "", *results, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
