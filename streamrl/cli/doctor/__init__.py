"""`streamrl doctor`: what is wrong with a machine, before a run finds out."""
