"""What the plugin will cost and count over, worked out before a run: `ds-moe-lb plan`."""
