"""What devices whose memory is the host's share: memory, streams, graphs, collectives and KV pages on CPU torch."""
