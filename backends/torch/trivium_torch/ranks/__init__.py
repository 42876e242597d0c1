"""One model over several devices of a machine, by heads or by layers, each with a process of its own, behind one Session."""
