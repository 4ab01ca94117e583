"""What this machine can do: facts are read once, and advice is a pure function of them."""
