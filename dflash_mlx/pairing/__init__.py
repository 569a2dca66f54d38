"""Which draft belongs to which target, why, and what can be refused before weights are read or fetched."""
