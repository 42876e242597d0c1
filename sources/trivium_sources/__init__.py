"""Where trivium's models come from besides local files: Hugging Face, ModelScope and Python packages. A plugin like others, with
no privilege: it implements the hook `trivium_model_source` and sees of trivium what every plugin sees."""
