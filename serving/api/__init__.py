"""Protocols over HTTP and gRPC, and the app that mounts them."""
