"""Runs read back from disk, shown: numbers, figures, one HTML page."""
