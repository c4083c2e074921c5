"""The kvprov command."""


def main() -> None:
    """Run the command line."""
