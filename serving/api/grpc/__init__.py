"""The gRPC service: the engine of `pagoda serve` under a second address, for callers that hold token ids or want typed stubs."""
