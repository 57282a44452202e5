"""p99lab: where the P99 of a long-context request goes."""
