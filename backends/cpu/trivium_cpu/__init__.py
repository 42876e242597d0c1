"""The CPU backend: a native tape of operations over packed weights and paged keys and values (see plugin.py)."""
