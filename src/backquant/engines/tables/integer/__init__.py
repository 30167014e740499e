"""The table of the integer reference: one file per operator family."""
