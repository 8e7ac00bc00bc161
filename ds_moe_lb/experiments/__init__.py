"""The paper's experiments on a toy language model: what is run, how, and what came out."""
