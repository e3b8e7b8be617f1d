"""Episodes: the turns of one, the record of what was sampled, and the group of siblings."""
