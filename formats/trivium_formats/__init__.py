"""Quantised checkpoints as their tools publish them: each format is an entry point of the group `trivium.weight_formats`, with no
privilege over anybody else's plugin. Nothing is imported before a checkpoint names its format."""
