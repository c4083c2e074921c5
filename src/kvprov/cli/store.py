"""`kvprov store`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvprov.cli.failure import INPUT, UNSAFE, one_line
from kvprov.cli.output import json_file_option, write_json
from kvprov.cli.terminal import page, status

if TYPE_CHECKING:
    from kvprov.check.store import StoreCheck, StoreDiff
    from kvprov.check.store.served import Model

AUTO: Final = "auto"
_SHOWN: Final = 20


@click.group(no_args_is_help=False)  # click's own way fails with the whole help, on one line
def store() -> None:
    """Compare stores that workers have written."""


@store.command(short_help="Compare two stores, or two snapshots of one.")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--format", "only", metavar="NAME", default=AUTO, show_default=True, help="Look for entries of one format."
)
@click.option("--tolerance", type=float, metavar="X", help="Take elements for equal that differ by no more than X.")
@click.option("--dtype", metavar="TYPE", help="The element type of entries that do not name theirs.")
@json_file_option
@click.pass_context
def diff(
    ctx: click.Context,
    first: Path,
    second: Path,
    only: str,
    tolerance: float | None,
    dtype: str | None,
    json_file: str | None,
) -> None:
    """Compare two stores, or two snapshots of one: which keys hold other bytes in each.

    A and B are folders that two workers wrote, through vLLM's ExampleConnector or fs tier, LMCache's fs L2, fs remote
    store or local disk, or SGLang's file backend. A key with other bytes in each is a collision: it leaves out what the
    two workers differ in. Formats are example, vllm-fs, lmcache-mp, lmcache-fs, lmcache-disk and sglang-file.

    Exits with 1 when there is a collision, and else with 2 when an entry of both could not be compared.
    """
    from kvprov.check.store import diff_stores

    with status("Comparing ..."):
        found = diff_stores(first, second, only=None if only == AUTO else only, tolerance=tolerance, dtype=dtype)
    if not write_json(found.to_json(), json_file):
        _show(found)
    if found.collisions:
        ctx.exit(UNSAFE)
    if found.undecided:
        ctx.exit(INPUT)


def _show(found: StoreDiff) -> None:
    from rich.table import Table

    rows = [
        ("in both stores", found.shared),
        ("  equal", found.equal),
        ("  collide", len(found.collisions)),
        ("  could not be compared", len(found.undecided)),
        ("in A alone", found.only_first),
        ("in B alone", found.only_second),
        ("files that are no entries", found.others),
        ("links and the like, not opened", found.odd),
    ]
    if found.tolerance is not None:
        rows.insert(2, (f"  within {found.tolerance:g}", found.within))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, count in rows:
        table.add_row(name, f"{count:,}")
    with page() as console:
        console.print(f"Formats: {', '.join(sorted(found.formats))}. Entries:")
        console.print(table)
        for title, listed in (("COLLIDE", found.collisions), ("NOT COMPARED", found.undecided)):
            for place, item in enumerate(listed):
                if place == _SHOWN:
                    console.print(f"... and {len(listed) - _SHOWN:,} more: see --json")
                    break
                outcome = item.outcome
                apart = "" if outcome.largest is None else f" largest difference {outcome.largest:g} ({outcome.dtype})"
                where = f" in {outcome.where}" if outcome.where else ""
                line = one_line(f"{title} {item.key}:{apart}{where} {outcome.reason}".rstrip(" :"))
                console.print(line, soft_wrap=True)
        console.print(one_line(found.words), style="bold red" if found.collisions else "bold")


@store.command(short_help="Compare what real workers write that differ in one dimension.")
@click.option(
    "--engine",
    type=click.Choice([AUTO, "vllm", "sglang"]),
    default=AUTO,
    show_default=True,
    help="Whose workers run. auto: whichever is installed.",
)
@click.option(
    "--model", type=click.Path(path_type=Path), metavar="DIR", help="A checkpoint. The default is a small one."
)
@click.option("--adapter", "adapters", multiple=True, type=click.Path(path_type=Path), metavar="DIR", help="Give two.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="SGLang: another checkpoint of the architecture. Default: the same with noise.",
)
@click.option(
    "--connector", metavar="NAME", help="vLLM: example (default), or vllm-fs on a GPU. SGLang: file (default)."
)
@click.option(
    "--engine-arg", "told", multiple=True, metavar="NAME=VALUE", help="Tell the engine more; VALUE is JSON or text."
)
@click.option("--dimension", "dimensions", multiple=True, metavar="NAME", help="In which workers differ. Default: all.")
@click.option("--tolerance", type=float, metavar="X", help="Take elements for equal that differ by no more than X.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep stores and logs in this new folder.")
@json_file_option
@click.pass_context
def check(
    ctx: click.Context,
    engine: str,
    model: Path | None,
    adapters: tuple[Path, ...],
    weights: Path | None,
    connector: str | None,
    told: tuple[str, ...],
    dimensions: tuple[str, ...],
    tolerance: float | None,
    keep: Path | None,
    json_file: str | None,
) -> None:
    """Let real workers that differ in one dimension write the same documents, and compare their stores.

    Starts vLLM or SGLang once for each worker: unbound, with the complete binding, and with one dimension left out at
    a time. On a CPU that takes a quarter of a minute each, or more. Exits with 1 when the complete binding does not
    separate two workers, or leaving out a dimension does not reopen that one alone.
    """
    import tempfile
    from contextlib import ExitStack

    from kvprov.check.store import check_stores
    from kvprov.check.store.fleets import installed_engine, make_fleet

    arguments = _arguments(told)
    chosen = installed_engine() if engine == AUTO else engine
    with ExitStack() as stack:
        if keep is None:
            keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvprov-stores-")))
        else:
            keep.mkdir(parents=True)
        work = keep.resolve() / "work"
        work.mkdir()
        fleet = make_fleet(chosen, connector, _served(chosen, model, adapters, weights, arguments, work), work)
        stack.enter_context(status("Workers write to their stores; each takes about a quarter of a minute ..."))
        found = check_stores(fleet, keep.resolve() / "stores", dimensions=dimensions, tolerance=tolerance)
    if not write_json(found.to_json(), json_file):
        _show_check(found)
    if not found.judged:
        ctx.exit(INPUT)
    if not found.sound:
        ctx.exit(UNSAFE)


def _arguments(told: tuple[str, ...]) -> dict[str, Any]:
    import json

    found: dict[str, Any] = {}
    for pair in told:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r:.80} is not NAME=VALUE.", param_hint="'--engine-arg'")
        try:
            found[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            found[name.replace("-", "_")] = text
    return found


def _served(
    engine: str,
    model: Path | None,
    adapters: tuple[Path, ...],
    weights: Path | None,
    arguments: dict[str, Any],
    work: Path,
) -> Model:
    from kvprov.check.store.fleets import SGLANG, bundled
    from kvprov.check.store.served import Model

    if len(adapters) not in (0, 2):
        raise click.UsageError("Give --adapter twice, or not at all.")
    if weights is not None and engine != SGLANG:
        raise click.UsageError("Only workers of SGLang's can be made to differ in their weights.")
    if model is not None:
        return Model(model, (adapters[0], adapters[1]) if adapters else None, weights, arguments)
    if adapters or weights is not None:
        raise click.UsageError("The bundled model brings what it needs: give --model with --adapter and --weights.")
    return bundled(engine, arguments, work)


def _show_check(found: StoreCheck) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("binding", "differ in", "shared", "collide", "outcome")
    for row in found.rows:
        binding = f"without {row.binding}" if row.binding in _names(found) else row.binding
        outcome = str(row.outcome) if row.sound else f"{row.outcome}: WRONG"
        table.add_row(binding, row.dimension, f"{row.diff.shared:,}", f"{len(row.diff.collisions):,}", outcome)
    with page() as console:
        console.print(one_line(f"{found.title}. One worker, run twice: {found.control.words}"), soft_wrap=True)
        console.print(table)
        console.print(one_line(found.words), style="bold" if found.sound else "bold red", soft_wrap=True)


def _names(found: StoreCheck) -> set[str]:
    return {row.dimension for row in found.rows}
