"""`python -m mlx_packs` is the `packs` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
