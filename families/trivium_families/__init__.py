"""Model families outside the core: each is an entry point of the group `trivium.models`, built from `trivium.models`' pieces,
with no privilege over anybody else's plugin. Nothing is imported before a checkpoint names its architecture."""
