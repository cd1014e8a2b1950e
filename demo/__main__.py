"""The main job on the embedded default, step by step, with a verdict.

A prompt is answered by the real SGLang with the connector on a slab store in ``.demo/``, the server
is killed, another one starts on the same store and answers the prompt from storage. Then the speed
of the connector beside the bare device.

Command: ``python -m demo`` in the root of the project. Exit status: 0 when the second answer came
from storage and is the same, else 1.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_cpu.client import EngineError
from engine_cpu.models import write_model
from engine_cpu.server import EngineConfig, EngineServer, connector_storage
from engine_cpu.verdict import Verdict
from rich.console import Console

ROOT = Path(".demo")
SUBJECTS = "ours,in-tree,nixl,fio"
PAGE = 16
CAPACITY = "1GiB"
PROMPT = "the quick brown fox jumps over the lazy dog " * 12

console = Console(highlight=False, soft_wrap=True)


class DemoError(RuntimeError):
    """A step other than a server's failed."""


def _step(title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


@contextmanager
def _served(config: EngineConfig, name: str) -> Iterator[EngineServer]:
    """A started server; the waiting is shown. Killed at the end if the block did not."""
    server = EngineServer(config, ROOT / f"{name}.log")
    with console.status("starting SGLang") as status:
        seconds = server.start(
            on_wait=lambda waited: status.update(
                f"starting SGLang, {waited:.0f} s; 25 to 75 s are usual"
            )
        )
    console.print(f"SGLang answers after {seconds:.0f} s, its log is {server.log}")
    try:
        yield server
    finally:
        server.kill()


def _start_block(log: Path) -> str:
    """The block the connector logs when it starts, or an empty string."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith("HiCache NIXL")]
    if not starts:
        return ""
    block = ["HiCache NIXL"]
    for line in lines[starts[0] + 1 :]:
        if not line.startswith("  "):
            break
        block.append(line)
    return "\n".join(block)


def keep_the_cache() -> Verdict:
    """Prompt, kill, restart, prompt."""
    store = (ROOT / "store").resolve()
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    url = f"slab://{store}"
    config = EngineConfig(
        model=write_model("mha", ROOT / "model"),
        storage=connector_storage(url, capacity=CAPACITY),
        page_size=PAGE,
    )

    _step("1. SGLang starts on an empty store")
    with _served(config, "first-server") as server:
        console.print(
            _start_block(server.log) or "the connector logged no start block", markup=False
        )

        _step("2. A prompt is computed and its pages are stored")
        before = server.generate(PROMPT)
        stored = server.wait_stored(before.prompt_tokens // PAGE * PAGE)
        console.print(
            f"{before.prompt_tokens} prompt tokens, {before.cached_tokens} of them cached; "
            f"{stored} tokens stored"
        )

        _step("3. The server is killed")
        server.kill()
        console.print("SIGKILL to every process of it")
    _print_store(url)

    _step("4. Another server on the same store, the same prompt")
    with _served(config, "second-server") as server:
        after = server.generate(PROMPT)
    return Verdict(before, after)


def _print_store(url: str) -> None:
    listing = subprocess.run(
        [Path(sys.executable).with_name("hicache-nixl"), "ls", "--store", url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        raise DemoError(f"hicache-nixl ls: {listing.stderr.strip() or listing.returncode}")
    console.print(listing.stdout.rstrip(), markup=False)


def show_speed() -> bool:
    """Print the speed of the connector beside the device; False when measuring failed."""
    _step("5. The connector on this disk, beside the bare device")
    if shutil.which("fio") is None:
        console.print("skipped, fio is missing — install it with: apt-get install fio")
        return True
    measured = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--subjects", SUBJECTS, "--dir", ROOT / "bench"],
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if measured.returncode != 0:
        console.print(f"measuring failed with status {measured.returncode}")
    return measured.returncode == 0


def main() -> int:
    """Run the demonstration; returns the exit status."""
    try:
        verdict = keep_the_cache()
    except (EngineError, DemoError) as error:
        console.print(str(error), markup=False)
        console.print("\n[bold red]FAIL[/bold red]: a step above did not succeed")
        return 1
    console.print(verdict.table())
    measured = show_speed()

    console.print("\n" + verdict.sentence("SIGKILL and restart"))
    return 0 if verdict.passed and measured else 1


if __name__ == "__main__":
    sys.exit(main())
