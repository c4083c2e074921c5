"""`python -m kvprov.cli` is the kvprov command."""

from kvprov.cli import main

if __name__ == "__main__":
    main()
