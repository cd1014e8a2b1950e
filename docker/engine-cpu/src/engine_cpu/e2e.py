"""One prompt before and after the server lost its memory, against a server that somebody runs.

Command: ``python -m engine_cpu.e2e URL``. Exit status: 0 when the second answer came from storage
and is the same, else 1.

Where this process shares the server's process namespace, every process of SGLang is killed and
whoever runs the server has to start it again. Elsewhere SGLang is told to drop what it has cached
on its device and in host memory.
"""

import argparse
import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from engine_cpu.client import EngineClient, EngineError
from engine_cpu.verdict import Verdict

TEXT = "the quick brown fox jumps over the lazy dog " * 12
START_TIMEOUT = 300.0

console = Console(highlight=False, soft_wrap=True)


def engine_processes() -> list[int]:
    """The process ids of SGLang's processes that this process can see."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes()
            if command.startswith(b"sglang::") or b"sglang.launch_server" in command:
                found.append(int(entry.name))
    return sorted(found)


def lose_memory(client: EngineClient) -> str:
    """Let the server lose what it keeps in memory; returns what was done, once it answers again."""
    victims = engine_processes()
    if not victims:
        reply = client.flush()
        if not reply.ok:
            raise EngineError(f"SGLang did not drop its cache: {reply.status} {reply.text}")
        return "dropping its device and host cache"
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + START_TIMEOUT
    while client.healthy():
        if time.monotonic() > deadline:
            raise EngineError("SGLang still answers after SIGKILL to every process of it")
        time.sleep(0.1)
    console.print(f"SIGKILL to {len(victims)} processes; waiting for SGLang to be started again")
    client.wait_healthy(START_TIMEOUT)
    return "SIGKILL and restart"


def tell(client: EngineClient, page: int, repeat: int, tolerance: float) -> bool:
    """Prompt, lose memory, prompt; prints the story. True when storage had it all."""
    client.wait_healthy(START_TIMEOUT)
    # Another prompt for each run: a store that is kept from the last one must not help.
    prompt = f"{secrets.token_hex(8)} {TEXT * repeat}"
    stored = client.stored_tokens()
    console.print(f"[bold]1. A prompt is computed by {client.url} and its pages are stored[/bold]")
    before = client.generate(prompt)
    client.wait_stored(stored + before.prompt_tokens // page * page)
    console.print(f"{before.prompt_tokens} prompt tokens, {before.cached_tokens} of them cached")
    console.print("[bold]2. SGLang loses its memory[/bold]")
    event = lose_memory(client)
    console.print("[bold]3. The same prompt[/bold]")
    verdict = Verdict(before, client.generate(prompt), tolerance)
    console.print(verdict.table())
    console.print(verdict.sentence(event))
    return verdict.passed


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="engine_cpu.e2e", description=__doc__.split("\n")[0])
    parser.add_argument("url", help="where the server listens, for instance http://engine:30000")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (16)")
    parser.add_argument(
        "--repeat", type=int, default=1, help="makes the prompt this many times as long (1)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="how far log probabilities may differ (0)"
    )
    options = parser.parse_args()
    try:
        client = EngineClient(options.url.rstrip("/"))
        passed = tell(client, options.page_size, options.repeat, options.tolerance)
    except EngineError as error:
        console.print(str(error), markup=False)
        console.print("[bold red]FAIL[/bold red]: a step above did not succeed")
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
