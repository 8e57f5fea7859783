"""The Python interface, cell by cell, on the tiny base: train, evaluate, swap packs."""

# %%
import mlx_packs as mp

base = mp.load_base("tiny")

# %% Train: 40 batches of the embedded data
run = mp.train_pack(
    base,
    data="tiny",
    lora=mp.LoRAConfig(rank=8),
    train=mp.TrainConfig(iters=40, learning_rate=3e-3, max_seq_length=128),
)
print(f"{run.report['pack']}: PPL {run.report['ppl_before']:.1f} → {run.report['ppl_after']:.1f}")

# %% Evaluate on other rows
report = mp.evaluate(base, pack=run.pack, data=mp.data.tiny_path() / "valid.jsonl").to_json()
print(f"valid: ratio {report['ppl_ratio']:.2f} on {report['rows']} rows")

# %% Evaluate: the pack at half and full strength beside the base, at two batch sizes
half = mp.weighted_sum([(run.pack, 0.5)])
for one in mp.evaluate_batch(
    base, {"half": half, "full": run.pack}, batch_sizes=[1, 4], limit=40, sequence_length=128
):
    print(f"{one.name:<5} x {one.batch_size}: PPL {one.ppl:.1f}, {one.decode_tps:.0f} tokens/s")

# %% Hot-swap: with the pack, and without it again
prompt = "Call Anna on Friday at noon."
with base.applied(run.pack):
    print("with   ", base.generate(prompt, max_tokens=30))
print("without", base.generate(prompt, max_tokens=30))
