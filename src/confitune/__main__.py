"""Run the command line as `python -m confitune`."""

from confitune.cli import main

if __name__ == "__main__":
    main()
