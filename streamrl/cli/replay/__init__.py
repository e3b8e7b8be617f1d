"""`streamrl replay`: a recorded run, trained again."""
