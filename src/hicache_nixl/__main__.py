"""`python -m hicache_nixl`: the console command, where that is not on the PATH."""

from hicache_nixl.cli.main import run

if __name__ == "__main__":
    run()
