"""`pagoda bench`: the engine alone (latency, throughput), its start, and a server under load. One file a measurement."""
