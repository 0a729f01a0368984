"""A run folder of 1,000,000 requests, made by `servetwin run`: what dashboard, report and exports are tried on.

    python benchmarks/million_requests.py OUT [--requests 1000000] [--overwrite]

Prompts of 256 to 768 tokens, 64 to 192 output tokens, 40 requests/s (Poisson); 128 seats are about four fifths busy,
the queue builds up now and then, and a pool of 4,200 blocks makes for some preemptions. A step takes 20 ms, so the run
has about five steps for four requests. Block residencies are not logged (as of any run of 50,000 requests or more).
About two minutes of one core and 300 MB of disk for the million.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from servetwin.sim.cli import run

REQUESTS = 1_000_000
LOAD = {
    "--dataset-name": "random",
    "--random-input-len": "512",
    "--random-output-len": "128",
    "--random-range-ratio": "0.5",
    "--request-rate": "40",
}
ENGINE = {
    "--executor": "constant",
    "--step-time-s": "0.02",
    "--max-num-seqs": "128",
    "--num-gpu-blocks-override": "4200",
}


def make(out: Path, requests: int = REQUESTS, *, overwrite: bool = False) -> int:
    """Writes the folder and returns the exit code of `servetwin run`."""
    flags = [word for pair in (LOAD | ENGINE).items() for word in pair]
    switches = ["--no-log-blocks", *(["--overwrite"] if overwrite else [])]
    return run(["run", *flags, "--num-prompts", str(requests), *switches, "--out", str(out)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args()
    return make(arguments.out, arguments.requests, overwrite=arguments.overwrite)


if __name__ == "__main__":
    raise SystemExit(main())
