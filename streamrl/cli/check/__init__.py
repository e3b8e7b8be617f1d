"""`streamrl check`: what is wrong with a machine, and whether a run can start on it."""
