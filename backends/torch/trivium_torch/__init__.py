"""Every operator in plain torch, on any torch device; and what backends for a vendor's torch devices start from (see plugin.py).

Nothing imports torch before probe().
"""
