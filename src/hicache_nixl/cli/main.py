"""`hicache-nixl`: look at a store, check it, and ask what SGLang needs to use it."""

import typer

from hicache_nixl import __version__
from hicache_nixl.cli import launch, lifecycle, probe, store

app = typer.Typer(
    help="The storage tier of SGLang's hierarchical KV cache, on NVIDIA NIXL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("probe", epilog=probe.EXAMPLE)(probe.probe)
app.command("launch-args", epilog=launch.EXAMPLE)(launch.launch)
app.command("ls", epilog=store.LS_EXAMPLE)(store.ls)
app.command("verify", epilog=store.VERIFY_EXAMPLE)(store.verify)
app.command("clear", epilog=store.CLEAR_EXAMPLE)(store.clear)
app.command("lifecycle", epilog=lifecycle.EXAMPLE)(lifecycle.lifecycle)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Options of every command."""
    if version:
        typer.echo(f"hicache-nixl {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
