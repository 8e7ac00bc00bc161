"""Routers whose weights are generated or frozen, in the place of a model's own linear ones."""
