"""A small MoE language model on bytes, its training loop, its evaluation and the folder of a run."""
