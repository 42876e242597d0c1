"""Speculative decoding: drafters guess the next tokens, the target checks them in one step, the output stays what it was."""
