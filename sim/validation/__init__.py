"""A simulated run beside a measured one: how far apart they are, and why."""
