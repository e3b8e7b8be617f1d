"""`streamrl parity`: measures how far engine and learner disagree on the same tokens."""
