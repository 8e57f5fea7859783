"""`--task focal`: its facts and its settings, which are read without MLX."""

from dataclasses import dataclass

from mlx_packs.config.choices import TaskFacts


@dataclass(frozen=True)
class FocalConfig:
    """The mapping `task_config` of a recipe."""

    gamma: float = 2.0  # 0 is the cross-entropy

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 5:
            raise ValueError(f"gamma must be in [0, 5], but is {self.gamma}.")


FOCAL = TaskFacts(
    code="focal_task.task:FocalTask",
    architecture="decoder",
    defaults={"learning_rate": 2e-4},
    masks=True,
    config="focal_task:FocalConfig",
    settings_of="lm",
)
