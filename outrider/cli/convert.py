"""`outrider convert`: a checkpoint as a GGUF file, for llama.cpp."""

from pathlib import Path

import click

from outrider.cli.output import check_folder, needs_extra

_TYPES = ("f32", "f16", "bf16", "q8_0")


@click.command("convert", short_help="A checkpoint as a GGUF file.")
@click.argument("model", metavar="DIR_OR_ID")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.gguf")
@click.option("--type", "kind", type=click.Choice(_TYPES), default="bf16", help="Type of the matrices.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub id.")
def convert_command(model: str, output: Path, kind: str, revision: str | None) -> None:
    """Write the checkpoint DIR_OR_ID as the GGUF file OUT.gguf, which --model and --target take.

    Supports plain Llama, Mistral, Qwen2, Qwen3, Gemma 3 and GPT-2. Needs the extras `service` and
    `llama`.

    \b
    outrider convert models/demo/target target.gguf --type q8_0
    """  # noqa: D301  # click reads the backspace: no rewrapping of the paragraph
    check_folder("OUT.gguf", output)
    with needs_extra("service,llama"):
        import gguf  # noqa: F401  # it is imported late below

        from outrider.runtime.gguf_convert import convert
    size = convert(model, output, kind, revision=revision)
    click.echo(f"{output}: {size / 1e6:.1f} MB, {kind}")
