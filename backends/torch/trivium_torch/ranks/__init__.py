"""Tensor parallelism: one model over several devices of a machine, each with a process of its own, behind one Session."""
