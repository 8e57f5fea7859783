"""Names of our settings in transformers, PEFT, TRL, axolotl, LLaMA-Factory and Unsloth.

They are not accepted, since some differ a little in meaning; errors suggest ours, for arguments of
public functions too (`arguments.py`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import PackError

# Settings that were removed, by their names in snake case: a sentence that says what to use now.
# Flags of every command, keys of recipes and arguments in Python are answered with it.
_SHELL_LOOP = "Use the two lines of shell in docs/runs.md, which continue a killed run."
REMOVED: Mapping[str, str] = {
    "for_merge": "Train without it: packs merge measures what a merge loses, and names a setting "
    "that passes.",
    "launch_agent": _SHELL_LOOP,
    "max_restarts": _SHELL_LOOP,
    "supervise": _SHELL_LOOP,
    "together": "Leave it out: trials are trained one after another.",
}
# Values that were removed, by setting and value, likewise.
REMOVED_VALUES: Mapping[tuple[str, str], str] = {}

# Keys of recipes, manifests (`measured`) and reports, as older versions wrote them.
RENAMED_KEYS = {
    "base_path": "matmul_path",
    "base_path_ms": "matmul_path_ms",
    "base_paths_at_work": "matmul_paths",
    "cache_prefix": "cache_frozen",
}

OTHER_NAMES = {
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "optimizer_config",
    "adapter": "method",
    "additional_target": "modules_to_save",
    "assistant_only_loss": "loss_on",
    "base_model": "model",
    "batch": "batch_size",
    "bf16": "compute_dtype",
    "block_size": "max_seq_length",
    "bnb_4bit_compute_dtype": "compute_dtype",
    "bnb_4bit_use_double_quant": "double_quant",
    "caffeinate": "awake",
    "chat_template_kwargs": "template_kwargs",
    "chat_template_path": "chat_template",
    "completion_only_loss": "loss_on",
    "context_length": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "data_path": "data",
    "dataset": "data",
    "dataset_name": "data",
    "dataset_num_proc": "num_proc",
    "dataset_text_field": "text_feature",
    "dtype": "compute_dtype",
    "early_stopping": "patience",
    "early_stopping_patience": "patience",
    "eval_batches": "val_batches",
    "eval_interval": "steps_per_eval",
    "eval_steps": "steps_per_eval",
    "finetuning_type": "method",
    "fp16": "compute_dtype",
    "full_finetuning": "method",
    "gradient_accumulation_steps": "grad_accumulation_steps",
    "gradient_checkpoint": "grad_checkpoint",
    "gradient_checkpointing": "grad_checkpoint",
    "gradient_clipping": "max_grad_norm",
    "init": "method",
    "init_lora_weights": "method",
    "keep_awake": "awake",
    "keep_dense": "keep",
    "layers_to_transform": "num_layers",
    "llm_int8_skip_modules": "keep",
    "lmbda": "on_policy",
    "load_best_model_at_end": "load_best",
    "load_in_4bit": "quantize",
    "load_in_8bit": "quantize",
    "loftq_config": "method",
    "logging_steps": "steps_per_report",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_layers": "num_layers",
    "lora_model_dir": "resume_adapter_file",
    "lora_modules_to_save": "modules_to_save",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_target": "target_modules",
    "lora_target_linear": "target_modules",
    "lora_target_modules": "target_modules",
    "loraplus_ratio": "loraplus_lr_ratio",
    "loss_type": "loss",
    "lr": "learning_rate",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule",
    "max_length": "max_seq_length",
    "max_seq_len": "max_seq_length",
    "max_steps": "iters",
    "max_time": "time",
    "max_train_steps": "iters",
    "max_train_time": "time",
    "metric_for_best_model": "best",
    "micro_batch_size": "batch_size",
    "model_id": "model",
    "model_name": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "modules_to_not_convert": "keep",
    "n_epochs": "epochs",
    "neftune_alpha": "neftune_noise_alpha",
    "no_sleep": "awake",
    "num_epochs": "epochs",
    "num_iters": "iters",
    "num_steps": "iters",
    "num_train_epochs": "epochs",
    "num_warmup_steps": "warmup_steps",
    "num_workers": "num_proc",
    "optim": "optimizer",
    "optim_args": "optimizer_config",
    "output": "out",
    "output_dir": "out",
    "peft_type": "method",
    "peft_use_dora": "method",
    "per_device_train_batch_size": "batch_size",
    "pref_beta": "beta",
    "preprocessing_num_workers": "num_proc",
    "qlora": "quantize",
    "quantization_bit": "quantize",
    "r": "rank",
    "random_seed": "seed",
    "random_state": "seed",
    "resume_from_checkpoint": "resume",
    "sample_packing": "packing",
    "save_freq": "save_every",
    "save_interval": "save_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "seq_len": "max_seq_length",
    "seq_length": "max_seq_length",
    "sequence_len": "max_seq_length",
    "sequence_length": "max_seq_length",
    "skip_modules": "keep",
    "stage": "task",
    "steps": "iters",
    "task_type": "task",
    "teacher_model": "teacher",
    "teacher_model_name_or_path": "teacher",
    "tensorboard": "report_to",
    "time_limit": "time",
    "torch_dtype": "compute_dtype",
    "train_batch_size": "batch_size",
    "train_data": "data",
    "train_file": "data",
    "train_on_inputs": "loss_on",
    "train_on_responses_only": "loss_on",
    "use_dora": "method",
    "use_gradient_checkpointing": "grad_checkpoint",
    "use_pissa": "method",
    "use_rslora": "rslora",
    "wandb": "report_to",
    "wandb_project": "project_name",
    "warmup": "warmup_steps",
    "warmup_fraction": "warmup_ratio",
    "wd": "weight_decay",
}

# Names of arguments of functions, and of the settings of generation.
ARGUMENT_NAMES = {
    "adapter": "pack",
    "adapter_path": "pack",
    "args": "train",
    "compute_loss_func": "loss",
    "config": "train",
    "do_sample": "temperature",
    "lora_config": "lora",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "peft_config": "lora",
    "repo_id": "repo",
    "reward_funcs": "reward",
    "temp": "temperature",
    "train_config": "train",
    "train_dataset": "data",
    "training_args": "train",
}

# The values to write for those that are switches.
OTHER_VALUES = {
    "assistant_only_loss": "assistant",
    "bf16": "bfloat16",
    "completion_only_loss": "completion",
    "fp16": "float16",
    "full_finetuning": "full",
    "load_in_4bit": "nf4",
    "load_in_8bit": "affine8",
    "loftq_config": "loftq",
    "lora_target_linear": "all-linear",
    "peft_use_dora": "dora",
    "qlora": "affine4",
    "tensorboard": "tensorboard",
    "train_on_responses_only": "assistant",
    "use_dora": "dora",
    "use_pissa": "pissa",
    "wandb": "wandb",
}


def ours_for(name: str, valid: Collection[str]) -> str | None:
    """Return our name for one of another library, a valid one if there is any."""
    names = [table[name] for table in (ARGUMENT_NAMES, OTHER_NAMES) if name in table]
    for ours in names:
        if ours in valid:
            return ours
    return names[-1] if names else None


def removal(name: str) -> str | None:
    """Return what to say of a removed setting, after its name; None for every other name."""
    sentence = REMOVED.get(name) or REMOVED.get(name.removeprefix("no_"))
    return f"was removed. {sentence}" if sentence else None


def check_removed_value(setting: str, value: Any, place: str) -> None:
    """Raise a PackError for a value that was removed; ``place`` is the flag, key or argument."""
    if isinstance(value, str) and (sentence := REMOVED_VALUES.get((setting, value))):
        raise PackError(f"{place}: the value '{value}' was removed. {sentence}", "unknown", setting)


def current_keys(values: Mapping) -> dict:
    """Return the mapping of a file that an older version wrote with today's name for every key.

    Settings that were removed since are left out unless they were used.
    """
    unused = {name for name in REMOVED if values.get(name) in (None, False, "none")}
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items() if key not in unused}
