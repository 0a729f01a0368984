"""The commands of `servetwin`, one module each; `sim/cli.py` registers them by name and imports none."""
