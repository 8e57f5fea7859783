"""Keep what a Mac's GPU computes at once short, before MLX first uses the GPU."""

import os
from pathlib import Path

from .. import runtime
from ..config.schema import TrainConfig
from ..display import Display
from ..errors import PackError
from ..memory.command_buffers import VARIABLE, chip_named, plan_buffers
from ..memory.headers import Headers
from ..memory.read import read_headers
from ..packs.base import Base
from ..runtime import mx


def limit_command_buffers(base: Base | str | Path, train: TrainConfig, display: Display) -> None:
    """Set MLX's limit of operations where command buffers would be too long, and say so.

    A limit in the environment is kept. MLX reads it once, so that a process that has used the GPU
    keeps what it had.
    """
    if not mx.metal.is_available():
        return

    value = os.environ.get(VARIABLE, "")
    limit = None
    if value.isdecimal():
        limit = int(value)

    try:
        if isinstance(base, Base):
            headers = Headers.of(base)
        else:
            headers = read_headers(base)
        chip = chip_named(runtime.processor_name())
        planned = plan_buffers(headers, train, chip, limit)
    except PackError:  # loading reports what is wrong; a family without a formula has no plan
        return

    line = planned.line()
    if planned.limit is not None:
        os.environ[VARIABLE] = str(planned.limit)
        if isinstance(base, Base) or mx.get_peak_memory():
            line += ", which has to be in the environment when Python starts"
    if line:
        display.line("gpu", line)
