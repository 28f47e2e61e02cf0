"""The CPU backend: torch, oneDNN and ops/native."""
