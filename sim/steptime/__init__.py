"""How long steps take when nothing measures them: step models, and the timers that carry them."""
