"""`kvprov digest`."""

from __future__ import annotations

import json
import os
from typing import BinaryIO, Final

import click

from kvprov.cli.failure import SUBJECT
from kvprov.cli.options import json_option
from kvprov.contract.document import evaluate, parse_document
from kvprov.contract.key import DigestBits, key_text

_BITS: Final = "KVPROV_DIGEST_BITS"
_STDIN: Final = "<stdin>"
MAX_DOCUMENT_BYTES: Final = 16 << 20


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--hex", "as_hex", is_flag=True, help="Print the digest in hexadecimal rather than as it enters keys.")
@click.option(
    "--bits",
    type=click.Choice([str(int(bits)) for bits in DigestBits]),
    help=f"How much of the digest to print: 256 bits or its first 128. The default is {_BITS}, else 256.",
)
@json_option
@click.pass_context
def digest(ctx: click.Context, file: BinaryIO, as_hex: bool, bits: str | None, as_json: bool) -> None:
    """Print the digest of a registry and a descriptor.

    FILE is a JSON document of the form that the specification gives in section 8, as each vector of
    descriptors.json is; - is standard input. The digest is printed as it enters keys. With --json: text, text_128,
    digest_hex, worker_digest_hex and enc_hex.
    """
    if as_json and (as_hex or bits):
        raise click.UsageError("--json has every form of the digest: leave out --hex and --bits.")
    width = DigestBits(int(bits)) if bits else _default_width()
    name = getattr(file, "name", _STDIN)
    if name != _STDIN:
        ctx.meta[SUBJECT] = name
    content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise click.UsageError(
            f"The document has more than {MAX_DOCUMENT_BYTES} bytes: check that it is the right file."
        )
    result = evaluate(*parse_document(content))
    if as_json:
        forms = {
            "text": result.text,
            "text_128": result.text_128,
            "digest_hex": result.digest.hex(),
            "worker_digest_hex": result.worker_digest.hex(),
            "enc_hex": result.enc.hex(),
        }
        click.echo(json.dumps(forms, indent=2))
    elif as_hex:
        click.echo(result.digest[: width // 8].hex())
    else:
        click.echo(key_text(result.digest, width))


def _default_width() -> DigestBits:
    from kvprov.settings import load_settings

    # This setting alone: another that is wrong has no part in a digest.
    return load_settings({name: value for name, value in os.environ.items() if name == _BITS}).digest_bits
