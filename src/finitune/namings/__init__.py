"""How adapters are spelled in files: one table of spellings, read and written through the same templates."""
