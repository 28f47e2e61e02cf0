"""`pagoda bench compare-peers`: other engines and Pagoda on the same checkpoint, under the same load, by turns. Peers run as processes."""
