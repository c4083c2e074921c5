"""The kvprov command."""


def main() -> None:
    """Run the command line, and exit."""
    from kvprov.cli.app import cli

    cli(prog_name="kvprov")
