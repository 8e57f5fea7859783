"""Run configuration: settings of adapters, training and data, as frozen dataclasses.

Command line, checks and error messages are made from the facts at each field (`Facts`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..gates import MEANING
from .choices import TASKS
from .common import CommonConfig
from .conflicts import TrainConflicts, seconds_of
from .data import COLUMN_SETTINGS as COLUMN_SETTINGS
from .data import DataConfig as DataConfig
from .fields import Settings
from .lora import LoRAConfig as LoRAConfig
from .optimizer import OptimizerConfig
from .phase import Phase as Phase
from .tasks import (
    CPOConfig,
    DPOConfig,
    EmbeddingConfig,
    GRPOConfig,
    KTOConfig,
    LMConfig,
    ORPOConfig,
    RewardConfig,
    SimPOConfig,
    tasks_of,
)

# The common settings come first; in each section of the help the order is the same.
ORDER = """
task method iters epochs learning_rate batch_size max_seq_length lr_schedule warmup_steps optimizer
grad_accumulation_steps seed quantize loss_on packing grad_checkpoint metric patience steps_per_eval
save_every time loss similarity_scale mini_batch_size triplet_margin triplet_distance beta
simpo_gamma cpo_alpha desirable_weight undesirable_weight center_rewards_coefficient reward
num_generations max_completion_length temperature exchange_dtype pipeline warmup_ratio
warmup_from_zero bias_correction weight_decay betas optimizer_config loraplus_lr_ratio for_merge
long_rows fim_rate fim_spm_rate fim_tokens num_proc max_grad_norm on_nan recompute micro_batches
cache_frozen objective ce_last_k z_loss label_smoothing neftune_noise_alpha matmul_path double_quant
keep compute_dtype train_fp16_fallback phases steps_per_report val_batches load_best test_batches
keep_last clear_cache_threshold pack_dtype awake max_pack_mb max_ppl_ratio min_tps_ratio
""".split()


@dataclass(frozen=True, repr=False)
class _Ordered(Settings):
    # The order of `TrainConfig`, as its last base; other bases have types and facts.
    __annotations__ = dict.fromkeys(ORDER, Any)


@dataclass(frozen=True, repr=False)
class TrainConfig(
    TrainConflicts,
    OptimizerConfig,
    CommonConfig,
    LMConfig,
    EmbeddingConfig,
    DPOConfig,
    ORPOConfig,
    SimPOConfig,
    CPOConfig,
    KTOConfig,
    RewardConfig,
    GRPOConfig,
    _Ordered,
):
    """Settings of the training; ``iters`` counts batches, as in mlx-lm."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the run, those of its phases in their order."""
        phases = dict.fromkeys(phase.task or self.task for phase in self.phases)
        return tuple(phases) or (self.task,)

    def of_other_tasks(self, task: str) -> dict[str, object]:
        """Return the defaults of the changed settings that a task does not have."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            name: defaults[name]
            for name in self.changed(vars(self))
            if task not in (tasks_of(name) or (task,))
        }

    @property
    def sequences(self) -> int:
        """The sequences of a batch; packed ones hold several examples each."""
        if self.packing:
            return self.batch_size
        facts = (TASKS[task] for task in self.tasks)
        return self.batch_size * max(
            self.num_generations if each.generates else each.sequences for each in facts
        )

    @property
    def seconds(self) -> float | None:
        """The maximum training time in seconds; None without a limit."""
        return None if self.time is None else seconds_of(self.time)

    @property
    def picks_best(self) -> bool:
        """Whether the run ends with the weights of the best validation."""
        return self.load_best or self.patience is not None

    @property
    def gates(self) -> dict[str, float | None]:
        """The limits that the pack must meet at the end of the run; None where there is none."""
        return {name: getattr(self, name) for name in MEANING}
