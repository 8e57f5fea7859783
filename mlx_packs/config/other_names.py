"""Names and values of our settings in transformers, PEFT, TRL, axolotl, LLaMA-Factory and Unsloth.

They are not accepted, since some differ a little in meaning; errors suggest ours, for flags, keys
of recipes and arguments of public functions.
"""

from collections.abc import Collection, Mapping

# Settings that were removed, by their names in snake case: a sentence that says what to use now.
# Flags of every command, keys of recipes and arguments in Python are answered with it.
_SHELL_LOOP = "Use the two lines of shell in docs/runs.md, which continue a killed run."
REMOVED: Mapping[str, str] = {
    "block": "Use --group-size.",
    "format": "Leave it out: transformers quantizes the dense checkpoint to the same codes, by "
    "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4').",
    "for_merge": "Train without it: packs merge measures what a merge loses, and names a setting "
    "that passes.",
    "hosts": "Use it with packs train. Other commands run on one machine.",
    "kv_bits": "Leave it out, and raise --kv-memory if a request does not fit.",
    "launch_agent": _SHELL_LOOP,
    "max_restarts": _SHELL_LOOP,
    "on_long_row": "Use --on-bad-row skip, which leaves out examples whose images do not fit, too.",
    "ratings_per_hour": "Leave it out: ratings need the key or the token of the server.",
    "runner": "Leave it out: trials are trained one after another on this machine.",
    "supervise": _SHELL_LOOP,
    "together": "Leave it out: trials are trained one after another.",
}

# Settings of other trainers that have no counterpart: what to do without them.
_WITHOUT = {
    "activation_offloading": "Leave it out: memory is unified.",
    "bias lora_bias": "Leave it out: biases are not trained next to adapters.",
    "deepspeed fsdp fsdp_config": "Use --hosts for several machines; one Mac has one memory.",
    "exclude_modules": "Name the others with --target-modules.",
    "fast_inference": "Use packs serve, which answers for many packs in one batch.",
    "flash_attention": "Leave it out: attention without T x T scores is always used.",
    "min_iters reduction_factor": "Leave it out: a sweep trains every trial to its end.",
    "padding_free": "Use --packing, which needs no padding.",
    "torch_compile": "Leave it out: every step is compiled.",
    "trainable_token_indices": "Train the embedding: --target-modules embed_tokens,q_proj,v_proj.",
    "use_liger_kernel": "Leave it out: the loss without full logits is always used.",
}

# By setting: what it is called elsewhere. ``name=value`` is a switch there for this value of ours.
_ELSEWHERE = {
    "alpha": "lora_alpha",
    "awake": "caffeinate keep_awake no_sleep",
    "batch_size": "batch micro_batch_size per_device_train_batch_size train_batch_size",
    "best": "metric_for_best_model",
    "beta": "pref_beta",
    "betas": "adam_beta1 adam_beta2",
    "chat_template": "chat_template_path",
    "compute_dtype": "bf16=bfloat16 bnb_4bit_compute_dtype dtype fp16=float16 torch_dtype",
    "data": "data_path dataset dataset_name train_data train_file",
    "double_quant": "bnb_4bit_use_double_quant",
    "dropout": "lora_dropout",
    "epochs": "n_epochs num_epochs num_train_epochs",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "grad_checkpoint": "gradient_checkpoint gradient_checkpointing use_gradient_checkpointing",
    "iters": "max_steps max_train_steps num_iters num_steps steps",
    "keep": "keep_dense llm_int8_skip_modules modules_to_not_convert skip_modules",
    "keep_last": "save_total_limit",
    "learning_rate": "lr",
    "load_best": "load_best_model_at_end",
    "loraplus_lr_ratio": "loraplus_ratio",
    "loss": "loss_type",
    "loss_on": "assistant_only_loss=assistant completion_only_loss=completion train_on_inputs "
    "train_on_responses_only=assistant",
    "lr_schedule": "lr_scheduler lr_scheduler_type",
    "max_grad_norm": "gradient_clipping",
    "max_seq_length": "block_size context_length cutoff_len max_length max_seq_len seq_len "
    "seq_length sequence_len sequence_length",
    "method": "adapter finetuning_type full_finetuning=full init init_lora_weights "
    "loftq_config=loftq peft_type peft_use_dora=dora use_dora=dora use_pissa=pissa",
    "model": "base_model model_id model_name model_name_or_path model_path",
    "modules_to_save": "additional_target lora_modules_to_save",
    "neftune_noise_alpha": "neftune_alpha",
    "num_layers": "layers_to_transform lora_layers",
    "num_proc": "dataset_num_proc num_workers preprocessing_num_workers",
    "on_policy": "lmbda",
    "optimizer": "optim",
    "optimizer_config": "adam_epsilon optim_args",
    "out": "output output_dir",
    "packing": "sample_packing",
    "patience": "early_stopping early_stopping_patience",
    "project_name": "wandb_project",
    "quantize": "load_in_4bit=nf4 load_in_8bit=affine8 qlora=nf4 quantization_bit",
    "rank": "lora_r lora_rank r",
    "report_to": "tensorboard=tensorboard wandb=wandb",
    "resume": "resume_from_checkpoint",
    "resume_adapter_file": "lora_model_dir",
    "rslora": "use_rslora",
    "save_every": "save_freq save_interval save_steps",
    "seed": "random_seed random_state",
    "steps_per_eval": "eval_interval eval_steps",
    "steps_per_report": "logging_steps",
    "target_modules": "lora_target lora_target_linear=all-linear lora_target_modules",
    "task": "stage task_type",
    "teacher": "teacher_model teacher_model_name_or_path",
    "template_kwargs": "chat_template_kwargs",
    "text_feature": "dataset_text_field",
    "time": "max_time max_train_time time_limit",
    "val_batches": "eval_batches",
    "warmup_ratio": "warmup_fraction",
    "warmup_steps": "num_warmup_steps warmup",
    "weight_decay": "wd",
}
# Arguments of functions, settings of generation, and options of mlx-lm's other commands.
_ARGUMENTS = {
    "bits": "q_bits",
    "data": "train_dataset",
    "group_size": "q_group_size",
    "lora": "lora_config peft_config",
    "loss": "compute_loss_func",
    "max_tokens": "max_completion_tokens max_length max_new_tokens",
    "mode": "q_mode",
    "model": "hf_path",
    "out": "mlx_path save_path",
    "pack": "adapter adapter_path",
    "repo": "repo_id",
    "reward": "reward_funcs",
    "temperature": "do_sample temp",
    "train": "args config train_config training_args",
}
# By command of ours: commands of other tools, and options for what it does.
_COMMANDS = {
    "bench": "benchmark",
    "chat": "run",
    "eval": "evaluate test",
    "export": "export_gguf",
    "inspect": "info show",
    "list": "ls",
    "merge": "fuse merge",
    "pull": "download",
    "push": "hub_model_id push_to_hub upload upload_repo",
    "quantize": "convert",
    "serve": "server",
    "train": "fine_tune finetune lora sft tune",
}
# By setting and value of ours: values elsewhere.
DTYPES = {"bfloat16": "bf16", "float16": "fp16 half", "float32": "fp32 float"}
_VALUES = {
    "task": {
        "lm": "causal_lm chat clm instruct instruction pretrain pt sft",
        "reward": "reward_model reward_modeling rm",
        "grpo": "dapo gspo ppo rl rloo",
        "dpo, and add --loss ipo": "ipo",
    },
    "method": {
        "lora, and add --quantize nf4": "qlora",
        "lora, and add --rslora": "rslora",
        "lora, and add --loraplus-lr-ratio 16": "lora+ loraplus",
        "full": "fft freeze full_finetuning full_ft",
    },
    "loss_on": {
        "completion": "answer completion_only completions output response responses",
        "assistant": "assistant_only assistants turn turns",
    },
    "recompute": {"block": "full true unsloth yes", "none": "false no"},
    "optimizer": {
        "lion": "lion_32bit lion_8bit paged_lion_8bit",
        "adamw": "adamw_hf adamw_torch adamw_torch_fused paged_adamw paged_adamw_32bit",
        "adamw_8bit": "adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit",
    },
    "lr_schedule": {
        "constant, and add --warmup-steps": "constant_with_warmup",
        "cosine": "cosine_decay cosine_with_min_lr cosine_with_restarts",
        "linear": "linear_decay polynomial",
        "wsd": "warmup_stable_decay",
    },
    "quantize": {"nf4": "4bit bnb bnb4 int4", "affine8": "8bit bnb8 int8", "mxfp4": "fp4"},
    "compute_dtype": DTYPES,
    "pack_dtype": DTYPES,
    "on_nan": {"skip, and lower --learning-rate": "back-off"},
    "search": {"random": "halving tpe"},
    "exchange_dtype": DTYPES,
    # of commands
    "to": {
        "peft": "hf huggingface sglang tgi transformers vllm",
        "mlx-lm": "mlx",
        "gguf": "llama-cpp llama.cpp llamacpp",
        "lmstudio": "lm-studio lm_studio",
        "swift": "ios mlx-swift",
    },
}


def _by_theirs(table: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a table, each with ours; a switch without its value."""
    return {name.partition("=")[0]: ours for ours, names in table.items() for name in names.split()}


OTHER_NAMES = _by_theirs(_ELSEWHERE)
ARGUMENT_NAMES = _by_theirs(_ARGUMENTS)
OTHER_COMMANDS = _by_theirs(_COMMANDS)
# The values to write for those that are switches.
OTHER_VALUES = dict(
    word.split("=") for names in _ELSEWHERE.values() for word in names.split() if "=" in word
)


def value_for(setting: str, value: str) -> str | None:
    """Return our value for one of another trainer; None if it is none."""
    return _by_theirs(_VALUES.get(setting, {})).get(value.lower())


def value_hint(setting: str, value: str) -> str:
    ours = value_for(setting, value)
    return f" Use {ours}." if ours else ""


def ours_for(name: str, valid: Collection[str]) -> str | None:
    """Return our name for one of another library, a valid one if there is any."""
    names = [table[name] for table in (ARGUMENT_NAMES, OTHER_NAMES) if name in table]
    for ours in names:
        if ours in valid:
            return ours
    return names[-1] if names else None


def removal(name: str) -> str | None:
    """Return what to say, after its name, of a setting without a counterpart; None of others."""
    if sentence := REMOVED.get(name) or REMOVED.get(name.removeprefix("no_")):
        return f"was removed. {sentence}"
    without = (sentence for names, sentence in _WITHOUT.items() if name in names.split())
    return next((f"is not a setting. {sentence}" for sentence in without), None)


def without_removed(recipe: Mapping) -> dict:
    """Return a recorded recipe without the removed settings that changed nothing in its run."""
    unused = (None, False, "none", "auto", "stop")
    return {k: v for k, v in recipe.items() if k not in REMOVED or v not in unused}
