"""`python -m mlx_packs.train ARGS` is `packs train ARGS`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
