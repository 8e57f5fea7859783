"""`python -m mlx_packs.train ARGS` is `packs train ARGS`."""

from .cli.train import main

if __name__ == "__main__":
    main()
