"""The command line: `servetwin COMMAND`. Commands are imported when they are called, so `--help` stays fast.

Exit codes: 0 good, 1 error, 2 usage, 3 infeasible, 4 SLO or threshold missed, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from servetwin.sim.commands.config_file import flag_sources
from servetwin.sim.commands.errors import InfeasibleError, PolicyFailedError
from servetwin.sim.commands.help_layout import help_formatter
from servetwin.sim.contract import EngineDeadError

COMMANDS = {
    "demo": "Run a small trained model on a shipped workload: the whole loop in one command.",
    "run": "Serve a workload in simulated time; steps are run for real or take modelled time.",
    "decide": "Print the scheduler's decisions for a scenario, one JSON line per step.",
    "execute": "Run recorded plans on the executor, without any scheduler.",
    "explain": "Tell the life of one request of a run: what happened when, and why it waited.",
    "profile": "Measure steps of a model on this machine.",
    "fit": "Fit step times to measurements, and tell how well they foretell what was left out.",
    "validate": "Simulate a measured run again, and tell how far apart the two are.",
    "plan": "Find the largest load that keeps its limits, or the fewest replicas for a load, and what that costs.",
    "sweep": "Run a workload with many configurations and seeds: a grid, draws, or a search; a table of all runs.",
    "kv": "How many requests fit: weights, KV cache and concurrency of a model on a card.",
    "trace": "Look at traces of requests; convert, scale, cut, merge, resample, fit and imitate them.",
    "compare": "What differs between two runs, request by request, and how sure that is.",
    "export": "A run in the formats of other tools: vllm bench serve, Prometheus, Perfetto, CSV.",
    "serve-metrics": "Replay a run as the /metrics endpoint of an engine, for Prometheus and Grafana.",
    "dash": "Look at runs in the browser.",
    "report": "Write a run as one HTML file: charts, figures, configuration, caveats, formulas.",
}

DETAILS = {
    "compare": "Latencies are those of requests that completed in both runs, paired by request_id; what cannot be "
    "paired is counted. Intervals are those of a bootstrap over blocks of consecutive requests: neighbours share a "
    "queue, so that single ones would make them too narrow. Figures of a run as a whole, and pooled gaps (itl), have "
    "no interval. Exit code 4: a limit of --fail-on is exceeded; whether the whole interval lies beyond it is said.",
    "serve-metrics": "Serves on 127.0.0.1 only. Metrics are those of `servetwin export prometheus`, as of the "
    "simulated second --from-s + --speed x (seconds since the start). At the end of the run its values stay, or with "
    "--loop it begins again. Ctrl-C or SIGTERM ends it. examples/grafana.json is a dashboard for them.",
}
"""What the help of a command says below its line."""


def make_app() -> App:
    app = App(
        name="servetwin",
        help="A twin of an LLM serving engine: vLLM V1 scheduling in simulated time, coupled to a real executor.",
        version_flags=["--version"],
        help_format="plaintext",
        help_formatter=help_formatter(),
        # Told by `run`, in the same words as everything else that ends a command.
        suppress_keyboard_interrupt=False,
    )
    for name, text in COMMANDS.items():
        function = name.replace("-", "_")
        help_text = "\n\n".join([text, *([DETAILS[name]] if name in DETAILS else [])])
        app.command(f"servetwin.sim.commands.{function}:{function}", name=name, help=help_text)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `servetwin` script."""
    # OpenMP's workers wait by spinning unless told otherwise before torch starts them. A model of small
    # operations then runs many times slower as soon as another process wants one of the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _show_log()
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def _show_log() -> None:
    """What the parts below tell people goes to stderr as it is, in this process of our own."""
    logger = logging.getLogger("servetwin")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        app = make_app()
        app.config = flag_sources(argv)
        code = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as e:
        return _complain(_with_hint(str(e).strip()), 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output has gone; nobody is left to tell.
        sys.stderr.close()
        return 1
    except ValueError as e:
        # Every refusal of input is a ValueError with a message for the person who typed the command.
        return _complain(str(e), 2)
    except InfeasibleError as e:
        return _complain(str(e), 3)
    except MemoryError as e:
        return _complain(f"out of memory: {e}" if str(e) else "out of memory", 1)
    except (OSError, PolicyFailedError, EngineDeadError) as e:
        return _complain(str(e), 1)
    return int(code or 0)


def _with_hint(message: str) -> str:
    """What to do with a flag that vLLM has and we do not."""
    from servetwin.sim.vllm_args import hint_for_unknown_flag

    match = re.search(r"Unknown option: (--[\w-]+)", message)
    return f"{message} {hint}" if match and (hint := hint_for_unknown_flag(match[1])) else message


def _complain(message: str, code: int) -> int:
    print(f"servetwin: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201 - the one place that prints errors
    return code
