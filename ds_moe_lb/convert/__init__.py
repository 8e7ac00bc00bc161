"""Dense transformers checkpoints become MoE checkpoints, as in LLaMA-MoE (arXiv 2406.16554)."""
