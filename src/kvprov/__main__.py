"""`python -m kvprov`."""

from kvprov.cli import main

main()
