"""Several engines behind one front door: routing, prefill and decode apart, scaling, failures."""
