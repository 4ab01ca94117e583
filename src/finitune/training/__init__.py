"""The training of adapters: objective, optimiser, guard, saved states, and the loop over them."""
