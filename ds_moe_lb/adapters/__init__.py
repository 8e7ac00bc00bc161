"""Routers that are not DeepSpeed's own TopKGate: the same balancing through the same records."""
