"""`streamrl samples`: what the policy writes, sample by sample."""
