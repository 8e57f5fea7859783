"""The public names: read by type checkers, and by mlx_packs/__init__.py to load them when used."""

from . import data as data
from .config.schema import DataConfig as DataConfig
from .config.schema import LoRAConfig as LoRAConfig
from .config.schema import Phase as Phase
from .config.schema import TrainConfig as TrainConfig
from .convert.combine import combine_packs as combine_packs
from .convert.interop import export_pack as export_pack
from .convert.interop import import_adapter as import_adapter
from .convert.merge import merge_pack as merge_pack
from .errors import PackError as PackError
from .evaluation.compare import BatchReport as BatchReport
from .evaluation.compare import evaluate_batch as evaluate_batch
from .evaluation.evaluate import evaluate as evaluate
from .evaluation.lm_eval import evaluate_tasks as evaluate_tasks
from .evaluation.perplexity import EvalReport as EvalReport
from .layers.trainer import LayerTrainer as LayerTrainer
from .memory.run_plan import RunPlan as RunPlan
from .memory.run_plan import plan as plan
from .ops.dispatch import backend as backend
from .packs.base import Base as Base
from .packs.base import load_base as load_base
from .packs.diff import diff as diff
from .packs.folder import list_packs as list_packs
from .packs.generation import batch_generate as batch_generate
from .packs.generation import generate as generate
from .packs.generation import stream_generate as stream_generate
from .packs.pack import Pack as Pack
from .packs.share import pull as pull
from .packs.share import push as push
from .packs.weighted_sum import weighted_sum as weighted_sum
from .tasks.describe import describe_data as describe_data
from .training.observer import Observer as Observer
from .training.result import TrainRun as TrainRun
from .training.run import train as train
from .training.run import train_pack as train_pack
from .training.run_page import write_page as write_page
from .training.seeds import SeedRuns as SeedRuns
from .training.seeds import train_seeds as train_seeds

__version__: str
