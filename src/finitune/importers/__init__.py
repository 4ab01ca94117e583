"""Other programs' configurations in our terms, with an account of every key."""
