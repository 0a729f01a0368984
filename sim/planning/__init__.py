"""Many runs to answer one question: sweeps, the load that meets an SLO, comparisons."""
