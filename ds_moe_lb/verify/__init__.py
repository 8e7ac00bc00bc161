"""`ds-moe-lb verify`: the balancing of a small MoE under the user's own layout, against fp64."""
