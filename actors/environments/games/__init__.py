"""Games in text: a state to read, an action in the policy's answer, the next state."""
