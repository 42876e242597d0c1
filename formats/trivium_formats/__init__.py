"""Checkpoints as tools publish them: quantised ones, each format an entry point of the group `trivium.weight_formats`, and GGUF
files (`trivium.checkpoints`), with no privilege over anybody else's plugin. Nothing is imported before a checkpoint
names its format."""
