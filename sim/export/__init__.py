"""A run in the formats of other tools: pure functions of its log."""
