"""ggml's block formats as GGUF files store them: their sizes, and decoders in plain torch. Imports torch alone."""
