"""What a training is asked to do: our own TOML, kohya's, and those of other trainers, as one strict schema."""
