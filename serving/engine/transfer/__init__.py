"""Cache connectors: host offload, disk and disaggregation."""
