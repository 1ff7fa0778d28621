"""``python -m sparsync``: the command line."""

from sparsync.cli.app import main

if __name__ == "__main__":
    main()
