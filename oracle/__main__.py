"""`python -m kvproof.oracle`: the `kvproof` command, where it is not installed."""

from .cli import main

if __name__ == "__main__":  # processes that it starts import this module as well
    main()
