"""Makes the tiny Qwen3 base that travels with mlx_packs.

Corpus, tokenizer, pretraining, 4-bit MLX checkpoint: the model has the architecture of Qwen3 with
6.6M parameters and is trained from scratch on texts that may be redistributed (corpus.py). Training runs in
torch, which on a CPU is 2 to 3 times as fast as MLX; the result is an ordinary Hugging Face
checkpoint, and mlx-lm's own converter turns it into the 4-bit MLX folder. In the last part of the
training the weights are rounded to their 4-bit values in the forward pass (straight-through
gradients), so that quantization costs next to nothing.

    python make_base.py --minutes 80 --compile        # train, then export
    python make_base.py --stage export                # export the newest snapshot of a run

Needs: torch, transformers, mlx, mlx-lm, and the Debian packages that README.md lists.
"""

import argparse
import ctypes
import json
import math
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import corpus
import numpy as np

HERE = Path(__file__).resolve().parent
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# Qwen's pre-tokenizer: contractions, words with one leading mark, single digits, punctuation,
# line breaks, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTEXT, LONG_CONTEXT, BATCH_TOKENS = 256, 1024, 2048
QUANTIZED_PART = (
    0.2  # the last part of the run: weights rounded to 4 bits, every fourth batch in long rows
)
PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRAD_NORM = 2e-3, 150, 0.1, 1.0
BITS, GROUP_SIZE = 4, 64
CHAT_SHARE = 0.08


# Tokenizer


def train_tokenizer(texts: list[str]):
    """A byte-level BPE tokenizer in the shape of Qwen's; the special tokens come last."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"] - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL["max_position_embeddings"],
    )


# Chats: documentation as simple questions and answers, so that the base knows turns and ends them


def make_chats(
    documents: list[corpus.Document], roots: list[Path], characters: int, rng: random.Random
) -> list[list]:
    """Conversations of about ``characters`` in all, made from ``documents`` only."""
    kept = {(d.source, d.name) for d in documents}
    chats = []
    for source, entries in (
        ("jargon", corpus.jargon_entries(roots)),
        ("devil", corpus.devil_entries(roots)),
    ):
        for number, (head, body) in enumerate(entries):
            if (source, f"{number}:{head}") in kept:
                ask = rng.choice(
                    ["What is {}?", "Define {}.", "What does {} mean?", "Explain the word {}."]
                )
                chats.append([("user", ask.format(head)), ("assistant", body.split("\n\n")[0])])
    for module, source in corpus.stdlib_files():
        if ("stdlib-docstrings", module) in kept:
            for name, doc in corpus.docstrings(module, source):
                ask = rng.choice(["What does {} do?", "Describe {}.", "What is {} for?"])
                answer = corpus.unwrap(doc).split("\n\n")[0]
                chats.append([("user", ask.format(name)), ("assistant", answer)])
    rng.shuffle(chats)
    chats = chats[: len(chats) // 2]
    prose = [(d, p) for d in documents for p in corpus.prose_of(d) if len(p) >= 2]
    rng.shuffle(prose)
    ask_first = ["Continue: {}", "Go on from here: {}", "What comes next? {}", "{}"]
    size = sum(len(text) for chat in chats for _, text in chat)
    for _, sentences in prose:
        if size > characters:
            break
        cut = rng.randint(1, len(sentences) - 1)
        first, rest = sentences[:cut], sentences[cut : cut + rng.randint(1, 4)]
        chat = [
            ("user", rng.choice(ask_first).format(" ".join(first))),
            ("assistant", " ".join(rest)),
        ]
        more = sentences[cut + len(rest) :]
        if more and rng.random() < 0.5:
            chat += [
                ("user", rng.choice(["Go on.", "Continue.", "And then?"])),
                ("assistant", " ".join(more[:3])),
            ]
        size += sum(len(text) for _, text in chat)
        chats.append(chat)
    rng.shuffle(chats)
    system = ("system", "You are a helpful assistant.")
    return [[system, *chat] if rng.random() < 0.25 else chat for chat in chats]


def chat_text(chat: list[tuple[str, str]]) -> str:
    """The text that the chat template makes of a conversation."""
    return "".join(f"<|im_start|>{role}\n{text.strip()}<|im_end|>\n" for role, text in chat)


# Rows


def prepare(work: Path, roots: list[Path], seed: int) -> None:
    """Split the corpus by document, train the tokenizer, write both as tokens to ``work``."""
    rng = random.Random(seed)
    documents = corpus.read_corpus(roots, seed=seed)
    rng.shuffle(documents)
    held_out = [d for i, d in enumerate(documents) if i % 50 == 0]
    train = [d for i, d in enumerate(documents) if i % 50]
    # Every second text is enough to learn the merges.
    tokenizer = train_tokenizer([d.text for d in train[::2]])
    tokenizer.save_pretrained(work / "tokenizer")
    documents_of, tokens_of = Counter[str](), Counter[str]()
    for name, part in (("train", train), ("held_out", held_out)):
        budget = int(CHAT_SHARE * sum(len(d.text) for d in part))
        texts = [(d.source, d.text.strip()) for d in part]
        texts += [("chat", chat_text(chat)) for chat in make_chats(part, roots, budget, rng)]
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(
            [t for _, t in texts], add_special_tokens=False
        )
        end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        tokens = [np.array([*row.ids, end], np.uint16) for row in encoded]
        lengths = [len(row) for row in tokens]
        for (source, _), length in zip(texts, lengths, strict=True):
            documents_of[f"{name}/{source}"] += 1
            tokens_of[f"{name}/{source}"] += length
        np.savez(work / f"{name}.npz", tokens=np.concatenate(tokens), lengths=lengths)
        print(f"corpus: {name}: {len(tokens):,} documents, {sum(lengths):,} tokens")
    facts = {"documents": documents_of, "tokens": tokens_of}
    (work / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")


def load_tokens(path: Path) -> list[np.ndarray]:
    """The token rows of one split, one array a document."""
    with np.load(path) as saved:
        return np.split(saved["tokens"], np.cumsum(saved["lengths"])[:-1])


def packed_rows(documents: list[np.ndarray], length: int, rng: np.random.Generator) -> np.ndarray:
    """All documents in random order, cut into rows [N, length + 1] in random order.

    The last token of a row is the first of the row that was cut behind it.
    """
    stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
    stream = np.roll(stream, -int(rng.integers(length)))
    count = (len(stream) - 1) // length
    rows = np.stack([stream[i * length : i * length + length + 1] for i in range(count)])
    return rows[rng.permutation(count)].astype(np.int64)


def batches(documents: list[np.ndarray], length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches [BATCH_TOKENS / length, length + 1]; packed anew for each epoch."""
    rng, size = np.random.default_rng(seed), BATCH_TOKENS // length
    while True:
        rows = packed_rows(documents, length, rng)
        for start in range(0, len(rows) - size + 1, size):
            yield rows[start : start + size]


# Training


def fake_quantize(weight):
    """The weight as MLX's affine quantization gives it back; gradients pass straight through."""
    import torch

    with torch.no_grad():
        groups = weight.reshape(-1, GROUP_SIZE)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        levels = 2**BITS - 1
        low_is_edge = low.abs() > high.abs()
        scale = ((high - low) / levels).clamp_min(1e-7)
        scale = torch.where(low_is_edge, scale, -scale)
        edge = torch.where(low_is_edge, low, high)
        steps = torch.round(edge / scale)
        scale = torch.where(steps != 0, edge / torch.where(steps != 0, steps, 1), scale)
        bias = torch.where(steps != 0, edge, 0)
        rounded = torch.round((groups - bias) / scale).clamp(0, levels) * scale + bias
        change = rounded.reshape(weight.shape) - weight
    return weight + change


def make_model():
    """A new Qwen3ForCausalLM; matrices that write to the residual stream start smaller."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ends = {
        "eos_token_id": MODEL["vocab_size"] - 5,
        "pad_token_id": MODEL["vocab_size"] - 7,
        "bos_token_id": None,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, **ends))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1 / math.sqrt(2 * MODEL["num_hidden_layers"]))
    return model


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up over steps; cosine over the run's progress (0 to 1) to 2 % of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * cosine)


def save_snapshot(model, work: Path) -> None:
    """Write the Hugging Face checkpoint atomically."""
    new, final = work / "hf.new", work / "hf"
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    for path in (work / "tokenizer").iterdir():
        shutil.copy(path, new / path.name)
    shutil.rmtree(final, ignore_errors=True)
    new.rename(final)


def train(
    work: Path, log: Path, minutes: float, steps: int | None, seed: int, compiled: bool
) -> None:
    """Pretrain for ``minutes`` of wall clock or exactly ``steps``.

    Snapshots go to ``work/hf``, the loss curve to ``log``.
    """
    import torch
    import torch.nn.functional as F
    from torch.func import functional_call

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model()
    torch.nn.Module.to(model, device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.99), fused=True)
    # Master weights, optimizer, norms and the loss are fp32; the matrix products run in bf16.
    precision = torch.autocast(device, torch.bfloat16)

    def loss_of(tokens: torch.Tensor, quantized: bool) -> torch.Tensor:
        weights = {
            n: fake_quantize(p) if quantized and p.ndim > 1 else p
            for n, p in model.named_parameters()
        }
        with precision:
            logits = functional_call(model, weights, (tokens[:, :-1],), {"use_cache": False}).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    step_loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    validation = packed_rows(load_tokens(work / "held_out.npz"), CONTEXT, np.random.default_rng(0))[
        :96
    ]

    @torch.no_grad()
    def held_out_loss(quantized: bool) -> float:
        parts = np.split(validation, len(validation) // (BATCH_TOKENS // CONTEXT))
        return float(
            np.mean(
                [step_loss(torch.from_numpy(rows).to(device), quantized).item() for rows in parts]
            )
        )

    documents = load_tokens(work / "train.npz")
    short, long = batches(documents, CONTEXT, seed), batches(documents, LONG_CONTEXT, seed + 1)
    start, saved_s, step, seen, recent, progress = time.monotonic(), 0.0, 0, 0, [], 0.0
    log.write_text("")
    while progress < 1:
        elapsed = time.monotonic() - start
        progress = (step + 1) / steps if steps else elapsed / (60 * minutes)
        quantized = progress > 1 - QUANTIZED_PART
        rows = next(long if quantized and step % 4 == 3 else short)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        loss = step_loss(torch.from_numpy(rows).to(device), quantized)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + rows.shape[0] * (rows.shape[1] - 1)
        recent.append(loss.item())
        if step == 50 or step % 100 == 0 or progress >= 1:
            line = {
                "step": step,
                "tokens": seen,
                "seconds": round(time.monotonic() - start, 1),
                "train_loss": round(float(np.mean(recent)), 4),
                "held_out_loss": round(held_out_loss(quantized), 4),
                "learning_rate": round(optimizer.param_groups[0]["lr"], 6),
                "quantized": quantized,
            }
            recent = []
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
        if time.monotonic() - start - saved_s > 300 or progress >= 1:
            save_snapshot(model, work)
            saved_s = time.monotonic() - start


# Export and measure


def load_blas() -> None:
    """Load OpenBLAS before the slow BLAS of MLX's CPU wheel; runs before mlx is imported."""
    try:
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        print("make_base: no libopenblas.so.0 (apt-get install libopenblas0); MLX will be slow")


def mlx_loss(folder: Path, rows: np.ndarray) -> float:
    """Mean loss of an MLX checkpoint on rows [N, T + 1]; quantized weights are made dense."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm import load
    from mlx_lm.utils import dequantize_model

    model = dequantize_model(load(str(folder))[0])
    losses: list[float] = []
    for part in np.array_split(rows, max(1, len(rows) // 8)):
        tokens = mx.array(part)
        loss = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        losses += np.array(loss.mean(axis=1)).tolist()
    return float(np.mean(losses))


def edit_json(path: Path, **changes: object) -> None:
    """Set the keys of a JSON file; a key whose value is None is removed."""
    values = {
        key: value
        for key, value in {**json.loads(path.read_text()), **changes}.items()
        if value is not None
    }
    path.write_text(json.dumps(values, indent=2) + "\n")


def tidy(folder: Path) -> None:
    """Make the converted folder one that older and newer readers of Qwen3 understand."""
    for name in ("README.md", "model.safetensors.index.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.copy(HERE / "chat_template.jinja", folder)
    end, turn_end = MODEL["vocab_size"] - 7, MODEL["vocab_size"] - 5
    # Names that transformers 4 knows too.
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        additional_special_tokens=["<|im_start|>"],
        extra_special_tokens=None,
        backend=None,
        is_local=None,
        local_files_only=None,
    )
    edit_json(
        folder / "config.json",
        rope_theta=MODEL["rope_theta"],
        eos_token_id=turn_end,
        pad_token_id=end,
    )
    ends = {"eos_token_id": [turn_end, end], "pad_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def export(work: Path, out: Path, measured_rows: int) -> None:
    """Convert the newest snapshot with mlx-lm, measure fp32 and 4 bits, place the latter."""
    load_blas()
    from mlx_lm import convert

    dense, small = work / "mlx_fp32", work / "mlx_4bit"
    for folder in (dense, small):
        shutil.rmtree(folder, ignore_errors=True)
    convert(str(work / "hf"), mlx_path=str(dense), dtype="float32")
    convert(
        str(work / "hf"),
        mlx_path=str(small),
        dtype="float32",
        quantize=True,
        q_bits=BITS,
        q_group_size=GROUP_SIZE,
    )
    tidy(small)
    if measured_rows:
        rows = packed_rows(load_tokens(work / "held_out.npz"), CONTEXT, np.random.default_rng(0))[
            :measured_rows
        ]
        facts = {
            "fp32": mlx_loss(dense, rows),
            "4bit": mlx_loss(small, rows),
            "tokens": rows.shape[0] * CONTEXT,
        }
        facts["bytes"] = sum(path.stat().st_size for path in small.iterdir())
        (work / "export.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(json.dumps(facts))
    out.mkdir(parents=True, exist_ok=True)
    for path in small.iterdir():
        shutil.copy(path, out / (path.name + ".new"))
        os.replace(out / (path.name + ".new"), out / path.name)


def plot(log: Path) -> None:
    """Draw the loss curve beside the log, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    tokens = [line["tokens"] / 1e6 for line in lines]
    axes.plot(tokens, [line["train_loss"] for line in lines], label="train", linewidth=1)
    axes.plot(tokens, [line["held_out_loss"] for line in lines], label="held out")
    switch = next((t for t, line in zip(tokens, lines, strict=True) if line["quantized"]), None)
    if switch is not None:
        axes.axvline(switch, color="grey", linestyle=":", label="4-bit weights from here")
    axes.set(xlabel="million tokens", ylabel="loss, nats a token", title="Tiny Qwen3 base")
    axes.legend()
    figure.savefig(log.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    stages = ("all", "prepare", "train", "export")
    parser.add_argument("--stage", choices=stages, default="all", help="default: all of them")
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="folder for intermediate files"
    )
    base = HERE.parents[1] / "mlx_packs" / "tiny" / "base"
    parser.add_argument("--out", type=Path, default=base, help="folder of the 4-bit MLX checkpoint")
    parser.add_argument(
        "--texts", type=Path, help="folder with packages unpacked by dpkg-deb -x, besides /"
    )
    parser.add_argument(
        "--minutes", type=float, default=80, help="wall-clock budget of the training"
    )
    parser.add_argument("--steps", type=int, help="train exactly so many steps instead")
    parser.add_argument(
        "--log", type=Path, default=HERE / "pretrain_log.jsonl", help="where the loss curve goes"
    )
    parser.add_argument(
        "--measured-rows", type=int, default=320, help="held-out rows for fp32 against 4 bits"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the step (needs a C++ compiler)"
    )
    args = parser.parse_args()

    roots = [Path("/")] + ([args.texts] if args.texts else [])
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage in ("all", "prepare"):
        prepare(args.work, roots, args.seed)
    if args.stage in ("all", "train"):
        import torch

        torch.set_num_threads(args.threads)
        train(args.work, args.log, args.minutes, args.steps, args.seed, args.compile)
        plot(args.log)
    if args.stage in ("all", "export"):
        export(args.work, args.out, args.measured_rows)


if __name__ == "__main__":
    main()
