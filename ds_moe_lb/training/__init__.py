"""A small MoE language model on bytes: training loop, evaluation, and the folder of a run."""
