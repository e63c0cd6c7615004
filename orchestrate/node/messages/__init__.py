"""How a node is reached: messages, their proofs, connections, and checks of what others send."""
