"""Byte-level text with a domain for every sequence: a built-in corpus, a user's folder, batches."""
