"""Parts of cpu_vs_peers.py and quality.py."""
