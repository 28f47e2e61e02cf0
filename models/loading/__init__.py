"""Weight sources and checkpoint files: safetensors, GGUF, dummy numbers."""
