"""`streamrl check`: whether a run can start as it is configured."""
